"""Checkers of notebook 00, The incident."""

from nan_lab.exercises import call, exercise


@exercise("00", difficulty=1, minutes=5)
def when_to_stop(answer):
    lonely = [True, False, True, True, False, True]
    if call(answer, [False] * 4 + [True] * 5) != 6:
        if answer([False] * 4 + [True] * 5) == 4:
            return "It returns the first of the three skips; the third one is asked for."
        return "Steps 4 to 8 of 9 are skipped: the third skip in a row is step 6."
    if answer(lonely) != -1:
        return "It stops although the skips are never three in a row: a good step ends the count."
    if answer([]) != -1 or answer([False, True, True]) != -1:
        return "Where there are never three skips, the answer is -1."
