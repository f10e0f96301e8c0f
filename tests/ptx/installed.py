"""The device of :mod:`ptx.driver`, for the processes that import this: name it in `modules`."""

from ptx.driver import Driver

device = Driver()
device.install()
