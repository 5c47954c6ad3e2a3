"""One GPU for each pytest-xdist worker, and a watchdog for tests that hang in a driver.

plugin.py    the hooks and fixtures pytest sees
lockfile.py  leases and heartbeats: what processes tell each other through one file
endings.py   which test ended which worker
gpus.py      which GPUs this process would see, asked in a child
sticky.py    errors after which a process can use its GPU no more
watchdog.py  ends workers that hang
"""
