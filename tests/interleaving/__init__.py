"""Races between the statements of two or three sessions, in every order there is.

``arena``    the ground: fresh rows for each merge, the race itself, what has to hold afterwards
``actors``   a session as the scripts see it: PostgreSQL's statements one by one, or a store's methods
``scripts``  what sessions do: write, send, claim, take over, cancel, settle …
``truths``   what each caller was told, compared with what is in the tables
"""
