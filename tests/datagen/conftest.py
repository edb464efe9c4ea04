"""Fixtures of the tests of data generation: runs of a tiny target."""

from training_runs import copy_run as copy_run
from training_runs import fork as fork
from training_runs import make_run as make_run
from training_runs import run_until_killed as run_until_killed
from training_runs import session_run as session_run
from training_runs import signalled as signalled
