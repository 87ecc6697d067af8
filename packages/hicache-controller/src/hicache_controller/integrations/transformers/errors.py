"""UnsupportedError: what the integration raises for a model, a cache or a way to generate that it cannot serve."""


class UnsupportedError(NotImplementedError):
    """The prefix cache cannot serve this; the message says what, and what works."""
