"""Latencies of decoding steps -> profile.json: timed here, by a user's command, or not timed but read or computed."""
