"""Grades a training loop by what it does in situations it has not seen; never by its source.

The rows of a `Grade`, in the order a person would mend them; their names do not change:

contract: a generator that draws each batch once, in order, yields one loss tensor with one element
    for each, raises nothing on a healthy start and ends with the loader. If it fails it is the
    only row: such a loop cannot be graded.
loss value: the yielded loss is the float64 cross entropy within 1e-3, at logit gaps 0, 5, 20, 110
    and 300, for right and for wrong predictions.
loss gradient: the gradient with respect to the logits is (p - y) / B in the same situations.
clipping: a spike is clipped by the global norm of all parameters (max_norm 0.1 to 5), and a
    small gradient passes unchanged.
loss scale: the size of the update does not depend on the loss scale, and in float16 a gradient
    too small for float16 still arrives, because the loss is scaled.
step order: each batch moves the weights once, along its own gradient alone, and after an
    overflow the scaler lowers its scale.
bad input: a NaN or inf in x is reported at the very step, and the weights are still finite.
overflow: an overflow in the forward pass is reported at the very step, and the weights are still
    finite.
non-finite gradient: a NaN or inf gradient under a finite loss leaves the weights finite; where no
    scaler skips the step (bfloat16), it is reported at the very step as well.
false alarm: nothing is reported on a healthy run, nor when the scaler skips a step as it should.
mixed precision: the forward pass runs in float16 or bfloat16 under autocast; parameters stay
    float32.
architecture: the model's modules, the names and the shapes in its state_dict stay as they were.
learning: at least 85 % of the digits are right after three ordinary epochs.
global state: default dtype, grad mode, autocast, seeds, warning filters are left as found.

Bonus rows, not needed to pass: "gradient reported" (a non-finite gradient under a finite loss is
reported even where the scaler skips it) and "soft labels" (the loss is right for labels that are
not one-hot, too).

"Reported at the very step" is an exception raised while that step's batch is in hand, whose text
or attribute carries the step's number (from 0, over the whole run), or a `warnings.warn` that
names it, for a loop that skips the step and goes on.
"""
