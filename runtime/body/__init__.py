"""One run's body on an event loop of its own: recorded-order delivery, durable timers, unwinding (R4, R7, R13, R14).

port       what crosses between a body and the engine
body       delivery: at quiescence exactly one entry, live and on replay
mail       unread messages and who waits for them
loop       the event loop: ready queue, timers, refusals
task       tasks that know where they stand
unwinding  taking a suspended body out of memory
"""

from perdure.runtime.body.body import Body
from perdure.runtime.body.errors import JournalMismatch, RefusedInBody
from perdure.runtime.body.port import BodyPort, Ending, Idle, MessageWait, StepCall

__all__ = [
    "Body",
    "BodyPort",
    "Ending",
    "Idle",
    "JournalMismatch",
    "MessageWait",
    "RefusedInBody",
    "StepCall",
]
