"""Why a mixed-precision training run goes NaN, what cures each cause, and how to catch it.

The modules, bottom to top: data, model, autocast, triggers, loops, record, figures; beside them
guard and locate (find the first NaN), exam (grade a loop) and exercises (check an answer).
"""
