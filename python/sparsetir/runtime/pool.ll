; The launcher of kernels' parallel loops; pool.py says why it exists, and chooses the pool.
;
; TVM's LLVM compiles this once per process. It refers to no external symbol: addresses are in @pool,
; which Python replaces by a single store, even while loops run.

; The fields of pool.py's _Pool.
%Pool = type { i64, ptr, ptr, ptr, ptr, ptr, ptr, ptr, ptr, ptr, i64, i64, i64, i64, i64, i64 }
%Env = type { ptr, i32 }                               ; TVMParallelGroupEnv: barrier, tasks
%Loop = type { ptr, ptr, ptr, ptr, i32, i64 }          ; body, data, pool, error, failed, last start

@pool = internal global ptr null, align 8
; Loops run on one thread until this time (ns), or until they have run this long (ns) on it.
@resume = internal global i64 0, align 8
@debt = internal global i64 0, align 8
@trips = internal global i64 0, align 8                ; attempts that started late, in a row
@pardoned = internal global i64 0, align 8             ; the late start (ns) that is not counted yet
@ended = internal global i64 0, align 8                ; when the last loop ended (ns)

define internal ptr @field(ptr %pool, i32 %n) alwaysinline {
  %at = getelementptr %Pool, ptr %pool, i32 0, i32 0
  %field = getelementptr i64, ptr %at, i32 %n
  %value = load ptr, ptr %field, align 8
  ret ptr %value
}

define internal i64 @number(ptr %pool, i32 %n) alwaysinline {
  %value = call ptr @field(ptr %pool, i32 %n)
  %number = ptrtoint ptr %value to i64
  ret i64 %number
}

define internal i64 @now(ptr %pool) {
  %time = alloca { i64, i64 }, align 8
  %clock = call ptr @field(ptr %pool, i32 9)
  %id = call i64 @number(ptr %pool, i32 15)            ; CLOCK_MONOTONIC
  %id32 = trunc i64 %id to i32
  call i32 %clock(i32 %id32, ptr %time)
  %s = load i64, ptr %time, align 8
  %ns.at = getelementptr { i64, i64 }, ptr %time, i32 0, i32 1
  %ns = load i64, ptr %ns.at, align 8
  %whole = mul i64 %s, 1000000000
  %sum = add i64 %whole, %ns
  ret i64 %sum
}

; The first error of all tasks is kept, for the thread that launched.
define internal void @keep_error(ptr %loop) cold noinline {
entry:
  %raised = alloca ptr, align 8
  store ptr null, ptr %raised, align 8
  %pool.at = getelementptr %Loop, ptr %loop, i32 0, i32 2
  %pool = load ptr, ptr %pool.at, align 8
  %take = call ptr @field(ptr %pool, i32 6)
  call void %take(ptr %raised)
  %error = load ptr, ptr %raised, align 8
  %failed.at = getelementptr %Loop, ptr %loop, i32 0, i32 4
  store atomic i32 1, ptr %failed.at release, align 4
  %none = icmp eq ptr %error, null
  br i1 %none, label %end, label %keep
keep:
  %error.at = getelementptr %Loop, ptr %loop, i32 0, i32 3
  %swap = cmpxchg ptr %error.at, ptr null, ptr %error acq_rel monotonic
  %first = extractvalue { ptr, i1 } %swap, 1
  br i1 %first, label %end, label %drop
drop:
  %free = call ptr @field(ptr %pool, i32 8)
  call i32 %free(ptr %error)
  br label %end
end:
  ret void
}

define internal void @run(ptr %loop, i32 %task, ptr %env) alwaysinline {
entry:
  %body = load ptr, ptr %loop, align 8
  %data.at = getelementptr %Loop, ptr %loop, i32 0, i32 1
  %data = load ptr, ptr %data.at, align 8
  %code = call i32 %body(i32 %task, ptr %env, ptr %data)
  %fine = icmp eq i32 %code, 0
  br i1 %fine, label %end, label %error
error:
  call void @keep_error(ptr %loop)
  br label %end
end:
  ret void
}

; A thread of OpenMP's team.
define internal void @openmp_task(ptr %loop) {
entry:
  %env = alloca %Env, align 8
  %pool.at = getelementptr %Loop, ptr %loop, i32 0, i32 2
  %pool = load ptr, ptr %pool.at, align 8
  %me.of = call ptr @field(ptr %pool, i32 2)
  %me = call i32 %me.of()
  %size.of = call ptr @field(ptr %pool, i32 3)
  %size = call i32 %size.of()
  store ptr null, ptr %env, align 8                    ; no barrier: our loops have none
  %tasks.at = getelementptr %Env, ptr %env, i32 0, i32 1
  store i32 %size, ptr %tasks.at, align 8
  %launcher = icmp eq i32 %me, 0
  br i1 %launcher, label %work, label %note
note:
  %start = call i64 @now(ptr %pool)
  %last.at = getelementptr %Loop, ptr %loop, i32 0, i32 5
  %before = atomicrmw max ptr %last.at, i64 %start monotonic
  br label %work
work:
  call void @run(ptr %loop, i32 %me, ptr %env)
  ret void
}

; A task on TVM's pool. It reports no error to the pool, which loses those of its workers.
define internal i32 @tvm_task(i32 %task, ptr %env, ptr %loop) {
  call void @run(ptr %loop, i32 %task, ptr %env)
  ret i32 0
}

; int TVMBackendParallelLaunch(FTVMParallelLambda body, void* data, int num_task)
define internal i32 @launch(ptr %body, ptr %data, i32 %num_task) {
entry:
  %loop = alloca %Loop, align 8
  %env = alloca %Env, align 8
  %pool = load atomic ptr, ptr @pool acquire, align 8
  store ptr %body, ptr %loop, align 8
  %data.at = getelementptr %Loop, ptr %loop, i32 0, i32 1
  store ptr %data, ptr %data.at, align 8
  %pool.at = getelementptr %Loop, ptr %loop, i32 0, i32 2
  store ptr %pool, ptr %pool.at, align 8
  %error.at = getelementptr %Loop, ptr %loop, i32 0, i32 3
  store ptr null, ptr %error.at, align 8
  %failed.at = getelementptr %Loop, ptr %loop, i32 0, i32 4
  store i32 0, ptr %failed.at, align 4
  %kind = load i64, ptr %pool, align 8
  %any = icmp eq i32 %num_task, 0                      ; TVM asks for no number
  %on = select i1 %any, i64 %kind, i64 0
  switch i64 %on, label %tvm [ i64 1, label %serial
                               i64 2, label %openmp ]
tvm:
  %tvm.launch = call ptr @field(ptr %pool, i32 5)
  %code = call i32 %tvm.launch(ptr @tvm_task, ptr %loop, i32 %num_task)
  %fine = icmp eq i32 %code, 0                         ; else an error of its own, which it raised
  br i1 %fine, label %done, label %refused
serial:
  store ptr null, ptr %env, align 8
  %tasks.at = getelementptr %Env, ptr %env, i32 0, i32 1
  store i32 1, ptr %tasks.at, align 8
  %serial.code = call i32 %body(i32 0, ptr %env, ptr %data)
  ret i32 %serial.code
openmp:
  %most.of = call ptr @field(ptr %pool, i32 4)
  %most = call i32 %most.of()
  %said.64 = call i64 @number(ptr %pool, i32 10)
  %said = trunc i64 %said.64 to i32
  %fewer = icmp slt i32 %said, %most
  %size = select i1 %fewer, i32 %said, i32 %most
  %alone = icmp sle i32 %size, 1
  br i1 %alone, label %serial, label %rested
rested:
  %begin = call i64 @now(ptr %pool)
  %until = load atomic i64, ptr @resume monotonic, align 8
  %early = icmp slt i64 %begin, %until
  %owed = load atomic i64, ptr @debt monotonic, align 8
  %owing = icmp sgt i64 %owed, 0
  %resting = and i1 %early, %owing
  br i1 %resting, label %rest, label %team
rest:
  store ptr null, ptr %env, align 8
  %rest.tasks.at = getelementptr %Env, ptr %env, i32 0, i32 1
  store i32 1, ptr %rest.tasks.at, align 8
  %rest.code = call i32 %body(i32 0, ptr %env, ptr %data)
  %rest.end = call i64 @now(ptr %pool)
  store atomic i64 %rest.end, ptr @ended monotonic, align 8
  %spent = sub i64 %rest.end, %begin
  %paid = atomicrmw sub ptr @debt, i64 %spent monotonic
  ret i32 %rest.code
team:
  %last.at = getelementptr %Loop, ptr %loop, i32 0, i32 5
  store i64 %begin, ptr %last.at, align 8
  %parallel = call ptr @field(ptr %pool, i32 1)
  call void %parallel(ptr @openmp_task, ptr %loop, i32 %size, i32 0)
  ; A thread that started this late had no core: one thread would have been faster, and is used for a
  ; multiple of the lost time, which doubles as long as each attempt is late, too.
  %end = call i64 @now(ptr %pool)
  %before = load atomic i64, ptr @ended monotonic, align 8
  store atomic i64 %end, ptr @ended monotonic, align 8
  %last = load i64, ptr %last.at, align 8
  %late = sub i64 %last, %begin
  %limit = call i64 @number(ptr %pool, i32 11)
  %busy = icmp sgt i64 %late, %limit
  %count = load atomic i64, ptr @trips monotonic, align 8
  %pardon = load atomic i64, ptr @pardoned monotonic, align 8
  br i1 %busy, label %tripped, label %quiet
quiet:
  %either = or i64 %count, %pardon
  %calm = icmp eq i64 %either, 0
  br i1 %calm, label %done, label %forget
forget:
  store atomic i64 0, ptr @trips monotonic, align 8
  store atomic i64 0, ptr @pardoned monotonic, align 8
  store atomic i64 0, ptr @debt monotonic, align 8
  br label %done
tripped:
  ; After a pause the threads of another program may still spin where ours slept, so that a late start
  ; only counts if that of the next loop is late, too.
  %idle = sub i64 %begin, %before
  %pause = call i64 @number(ptr %pool, i32 13)
  %paused = icmp sgt i64 %idle, %pause
  %unpardoned = icmp eq i64 %pardon, 0
  %excused = and i1 %paused, %unpardoned
  br i1 %excused, label %excuse, label %charge
excuse:
  store atomic i64 %late, ptr @pardoned monotonic, align 8
  br label %done
charge:
  store atomic i64 0, ptr @pardoned monotonic, align 8
  %more = icmp slt i64 %count, 4
  %one = zext i1 %more to i64
  %counted = add i64 %count, %one
  store atomic i64 %counted, ptr @trips monotonic, align 8
  %lost = add i64 %late, %pardon
  %rest.for = call i64 @number(ptr %pool, i32 12)
  %debt.one = mul i64 %lost, %rest.for
  %debt.now = shl i64 %debt.one, %count
  store atomic i64 %debt.now, ptr @debt monotonic, align 8
  %wait.for = call i64 @number(ptr %pool, i32 14)
  %wait = mul i64 %lost, %wait.for
  %then = add i64 %end, %wait
  store atomic i64 %then, ptr @resume monotonic, align 8
  br label %done
done:
  %failed = load atomic i32, ptr %failed.at acquire, align 4
  %bad = icmp ne i32 %failed, 0
  br i1 %bad, label %fail, label %good
good:
  ret i32 0
fail:
  %error = load ptr, ptr %error.at, align 8
  %none = icmp eq ptr %error, null
  br i1 %none, label %refused, label %raise
raise:
  %set = call ptr @field(ptr %pool, i32 7)
  call void %set(ptr %error)
  %free = call ptr @field(ptr %pool, i32 8)
  call i32 %free(ptr %error)
  br label %refused
refused:
  ret i32 -1
}

; tvm_ffi stores here the function that the modules it loads call.
@__TVMBackendParallelLaunch = linkonce dllexport global ptr null, align 8

; Addresses for Python, as integers: TVMFFIAny is { i32 type, i32, i64 }, and an integer's type is 1.
define internal i32 @answer(ptr %result, i64 %value) {
  store i32 1, ptr %result, align 8
  %at = getelementptr i8, ptr %result, i64 8
  store i64 %value, ptr %at, align 8
  ret i32 0
}

define dllexport i32 @__tvm_ffi_launcher(ptr %self, ptr %args, i32 %n, ptr %result) {
  %code = call i32 @answer(ptr %result, i64 ptrtoint (ptr @launch to i64))
  ret i32 %code
}

define dllexport i32 @__tvm_ffi_pool(ptr %self, ptr %args, i32 %n, ptr %result) {
  %code = call i32 @answer(ptr %result, i64 ptrtoint (ptr @pool to i64))
  ret i32 %code
}

define dllexport i32 @__tvm_ffi_resume(ptr %self, ptr %args, i32 %n, ptr %result) {
  %code = call i32 @answer(ptr %result, i64 ptrtoint (ptr @resume to i64))
  ret i32 %code
}

define dllexport i32 @__tvm_ffi_given(ptr %self, ptr %args, i32 %n, ptr %result) {
  %given = load i64, ptr @__TVMBackendParallelLaunch, align 8
  %code = call i32 @answer(ptr %result, i64 %given)
  ret i32 %code
}
