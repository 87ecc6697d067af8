"""Tools on top of the cache: the command line, replay, capacity planning and benchmarks; nothing else imports them."""
