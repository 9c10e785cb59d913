"""Why a mixed-precision training run goes NaN, what cures each cause, and how to catch it.

The modules, bottom to top: data, model, autocast, triggers, record, figures and figures_dtype;
snapshot, tracer, report, locate and guard, which find the first NaN; loops; exam with its parts,
which grades a loop; exercises, which check an answer.
"""
