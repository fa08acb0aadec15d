"""What people write workflows with: definitions, context, policies, errors, and how values become text.

definitions, step   `@workflow` and `@step`: names, options, payload, result
context             what a body does durable things with
current             what a step knows about itself
retry, durations    when to try again, how long to wait
codec, canonical    values as text by their annotation; inputs as one text for comparison
losses              what of a value would not come back
failures, errors    errors as text and back; the errors themselves
names               which names and ids are allowed, how run ids come about
registry            the workflows one application knows
"""
