"""The one error type that a person using NibbleKV is meant to read."""


class NibbleError(Exception):
    """Bad input, a bad file or an unsupported shape.

    The message says what was got, what is allowed and what to do next. Stages print it without a traceback.
    """
