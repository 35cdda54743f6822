"""The systems of `kvlink-bench peers`, one file each, which its own interpreter runs by `end.py`.

Such a file imports nothing of this library. It has the constants `COPIES`, `VERIFIES` and `WAITS`,
which say what a transfer does, and `REQUIRES`, pip's options and requirements, a tuple for each run
of pip; none if this library's own interpreter has all. `HINT` is added to the text of its errors.
Two context managers take an `End`: `sender` yields a function that sends the blocks once, and
`receiver` one that waits until the bytes of a transfer can be read in its process, returns that
moment in monotonic nanoseconds, or what `End.arrived` has noted, and leaves all bytes in the target
blocks when it returns.
"""
