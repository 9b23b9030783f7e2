"""The tests, laid out as ``src/trainfit`` is: what tests ``loader/tune`` is in ``loader/tune``.

A package, and the repository's root on the path (``pythonpath``), so that workers started by
spawn find the classes of a test module under its name, ``tests.loader.tune.test_tuning``.
"""
