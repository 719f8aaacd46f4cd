"""`rose verify`'s parts: running a folder over texts, stored answers, measures, and gates."""
