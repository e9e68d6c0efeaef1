"""Latencies of decoding steps -> profile.json: timed here, or not timed but read or computed."""
