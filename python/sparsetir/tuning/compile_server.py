"""The process that compiles programs to files; :mod:`sparsetir.graph.ahead` is its client."""

from __future__ import annotations

from sparsetir.machine import assume, this_machine
from sparsetir.runtime.kernel_cache import kept_kernel
from sparsetir.runtime.pipeline import lower
from sparsetir.schedules.targets import host_target
from sparsetir.sparse_ir.script.parser import from_source
from sparsetir.tuning.serving import serve


class Compiler:
    """Compiles programs for the threads that the client has."""

    def compile(self, key: str, text: str) -> None:
        """Compile a program in TVMScript with the default schedule, and keep it by `key`."""
        target = host_target()
        kept_kernel(lambda: key, target, lambda: lower(from_source(text), target=target))


def main(answers: int, parent: int, threads: int, work_of_threads: int) -> None:
    """Serve a client; threads, work_of_threads : fields of `Machine` for the client's pool."""
    client = this_machine()._replace(threads=threads, work_of_threads=work_of_threads)
    with assume(client):
        serve(answers, parent, Compiler)
