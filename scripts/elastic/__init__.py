"""Parts of scripts/bench_elastic.py."""
