"""What the tests stand on: real servers, real faults, and independent witnesses.

``postgres``   a private PostgreSQL server that can be restarted, killed and thrown away
``fixtures``   the pytest fixtures built on it
``proxy``      a TCP proxy that cuts or hangs a connection at a chosen statement
``audit``      triggers that keep the history of every committed write
``checkers``   what that history must never show
``sidelog``    an append-only log of body and step executions, and its checker
``pods``       real pods as child processes that can be killed, frozen and stopped
``interleave`` every merge of the statements of two or three sessions
``watch``      lock waits of a PostgreSQL server's sessions, and their end
``waiting``    waiting for a condition with a deadline, never for a time
"""
