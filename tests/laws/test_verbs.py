"""`MIModel` is made of classes of verbs: none of them may take another one's names."""

from collections import Counter

from mionnx import MIModel


def test_no_two_classes_define_the_same_name():
    defined = Counter(
        name
        for base in MIModel.__mro__[:-1]
        for name in vars(base)
        if not (name.startswith("__") and name.endswith("__")) and name != "_abc_impl"
    )
    assert [name for name, count in defined.items() if count > 1] == []
