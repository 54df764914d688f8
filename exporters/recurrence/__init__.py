"""One linear recurrence for every recurrent layer, in forms of standard operators that give the same numbers."""
