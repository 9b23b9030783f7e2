"""Command lines that are wrong: exit code 2, at most three lines, no traceback, nothing run."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers_cli import called_here, trainfit
from trainfit.cli.parser import VERBS

#: Written as a shell's; one that needs a script that runs is in the tests of its verb.
LINES = """
paln
plna -- python train.py
Plan
--gpu a100-80gb-sxm plan -- python train.py
--nonsense
--versoin
train.py --epochs 3
python train.py
torchrun train.py
-
''
sweep
sweep absent.toml
sweep absent.toml --jobs 0
sweep one.toml two.toml
plan
plan --
plan --gpu
plan --gpus a100-80gb-sxm -- python train.py
plan --gpu --json -- python train.py
plan --gpu 'RTX 9999' -- python train.py
plan --gpu '' -- python train.py
plan --gpu custom:0GiB -- python train.py
plan --gpu custom:manyGiB -- python train.py
plan --gpu T4,T4 -- python train.py
plan --gpu 'T4, A100' -- python train.py
plan --gpu 'RTX 4090 x2' -- python train.py
plan --gpu T4 --solve nonsense -- python train.py
plan --gpu a100-80gb-sxm -- python absent.py
plan --gpu a100-80gb-sxm -- python folder
plan --gpu a100-80gb-sxm -- python -m absent_module_of_nobody
plan --gpu a100-80gb-sxm -- python
plan --gpu a100-80gb-sxm -- absent-command train.py
plan --gpu a100-80gb-sxm -- ls
plan --gpu a100-80gb-sxm -- bash train.sh
plan --gpu a100-80gb-sxm -- python train.py --bs={batch_size:x}
plan --gpu a100-80gb-sxm -- python train.py --bs={batch_size:0}
plan --gpu a100-80gb-sxm -- python train.py --bs={batch_size:-4}
plan --gpu a100-80gb-sxm -- python train.py --bs={batchsize:8}
plan --gpu a100-80gb-sxm -- python train.py --bs={batch_size}
plan --gpu a100-80gb-sxm -- python train.py --bs={batch_size:8} --b2={batch_size:16}
plan --gpu a100-80gb-sxm -- python train.py --amp={amp:perhaps}
plan --gpu a100-80gb-sxm -- python empty.py
plan --gpu a100-80gb-sxm -- python binary.py
plan --gpu a100-80gb-sxm -- python broken.py
plan --gpu a100-80gb-sxm -- python leaves.py
plan --gpu a100-80gb-sxm -- python refuses.py
plan --steps 0 -- python train.py
plan --steps -3 -- python train.py
plan --steps 1.5 -- python train.py
plan --steps many -- python train.py
plan --time-limit nan -- python train.py
plan --time-limit inf -- python train.py
plan --time-limit -1 -- python train.py
plan --time-limit 1e30 -- python train.py
plan --other-processes '12 GiBB' -- python train.py
plan --other-processes -1GiB -- python train.py
plan --gpu a100-80gb-sxm --other-processes 999999GiB -- python train.py
plan --headroom 110% -- python train.py
plan --headroom nan -- python train.py
plan --headroom -10% -- python train.py
plan --step-time -5ms -- python train.py
plan --step-time 5parsecs -- python train.py
plan --cpu cores=0 -- python train.py
plan --cpu cores=2,cores=3 -- python train.py
plan --cpu kind=abacus -- python train.py
plan --cpu fast -- python train.py
plan --noise-scale -3 -- python train.py
plan --noise-scale absent.json --gpu a100-80gb-sxm -- python train.py
plan --noise-scale other.json --gpu a100-80gb-sxm -- python train.py
plan --remedies=magic --gpu a100-80gb-sxm -- python train.py
plan --remedies --no-remedies -- python train.py
plan --loader --no-loader -- python train.py
plan --no-loader --step-time 5ms --gpu a100-80gb-sxm -- python train.py
plan --no-loader --probe-time 5 --gpu a100-80gb-sxm -- python train.py
plan --allow-writes --keep-writes kept -- python train.py
plan --gpu a100-80gb-sxm --keep-writes full -- python train.py
plan --gpu a100-80gb-sxm --keep-writes train.py -- python train.py
plan --gpu a100-80gb-sxm --output taken.txt -- python train.py
plan --gpu a100-80gb-sxm --output absent/out.json -- python train.py
plan --gpu a100-80gb-sxm --output folder -- python train.py
plan --gpu a100-80gb-sxm --output - -- python train.py
plan --gpu a100-80gb-sxm --profile absent.json -- python train.py
plan --gpu a100-80gb-sxm --profile other.json -- python train.py
plan --gpu a100-80gb-sxm --profile folder -- python train.py
plan --gpu a100-80gb-sxm --force-profile -- python train.py
plan --json=1 -- python train.py
plan -x -- python train.py
plan --gpu a100-80gb-sxm -- python $'tr\\xffin.py'
plan --gpu $'\\xff' -- python train.py
plan --$'\\xff' -- python train.py
simulate
simulate --gpu a100-80gb-sxm absent.py
simulate --gpu a100-80gb-sxm folder
simulate --gpu a100-80gb-sxm broken.py
simulate --gpu a100-80gb-sxm empty.py
simulate --gpu a100-80gb-sxm -m
simulate --gpu a100-80gb-sxm --batch-size 0 train.py
simulate --gpu a100-80gb-sxm --batch-size -8 train.py
simulate --gpu a100-80gb-sxm --output taken.txt train.py
simulate --gpu a100-80gb-sxm --outptu x.trainfit train.py
memory
memory absent.trainfit
memory folder
memory other.json
memory binary.py
memory broken.zip
memory ''
memory train.py/absent
memory newer.json
memory --batch-size 1,2,3 a b
memory --batch-size x absent.trainfit
memory --by-hand absent.trainfit other.trainfit
memory a b c
gpus 'RTX 9999'
gpus --for absent.json
gpus --for other.json
gpus --for binary.py
gpus --samples 4
gpus --samples -4
gpus --budget nan --for other.json
gpus --budget -5
gpus --measured 'RTX 3090'
gpus --measured 'RTX 3090=fast'
gpus --for newer.json --for newer.json
gpus --price absent.toml --for other.json
gpus --output taken.txt
gpus rtx 4090
batch
batch shrink --to 8
batch explain
batch explain --to 0 --batch-size 4
batch explain --to 8
batch explain --to 8 --batch-size 8
batch explain absent.json --to 8
batch explain other.json --to 8
batch explain --to 8 --batch-size 4 --lr -1
batch explain --to 8 --batch-size 4 --beta2 1.5
batch explain --to 8 --batch-size 4 --optimizer adma
batch explain --to 8 --batch-size 4 --accumulation 3
batch explain --to 8 --batch-size 4 --data absent.csv
batch explain --to 8 --batch-size 4 --data binary.py
loader
loader --step-time 40ms
loader --loader data.py
loader --loader data.py:make -- python train.py
loader --loader data.py:make --confirm 9
loader --loader data.py:make
loader --step-time 1ms --loader data.py:make --time-limit 5
loader --step-time 1ms --loader data.py:make --max-workers -1
loader --step-time 1ms --batch-size 4 -- python train.py
loader --step-time 1ms --ranks 0 -- python train.py
loader --step-tiem 1ms -- python train.py
loader --step-time 1ms -- python leaves.py
loader --step-time 1ms -- python broken.py
rehearse
rehearse --loader data.py:make
rehearse --step-time 1ms --duration 9h -- python train.py
rehearse --step-time 1ms --num-workers -2 -- python train.py
rehearse --step-time 1ms --start-method thread -- python train.py
rehearse --step-time 1ms --compare other.json -- python train.py
rehearse --step-time 1ms --compare absent.json -- python train.py
watch
watch --
watch -- absent-command
watch --folder train.py -- python train.py
watch --folder full -- python train.py
watch --read absent
watch --read folder
watch --read train.py
watch --attach absent
watch --verify
watch --verify-steps 5 -- python train.py
watch --verify --verify-runs 6 -- python train.py
watch --noise-scale --read folder
watch --read folder -- python train.py
compare
compare folder
compare absent folder
compare folder folder
compare other.json taken.txt
compare a b c
compare '' ''
verify
verify absent.json
verify other.json
verify truncated.json
verify --tolerance 200% other.json
verify --steps 0 other.json
pace
pace data.py
pace absent.py:act
pace data.py:absent
pace .:act
pace folder/:act
pace data.py:NUMBER
pace broken.py:act
pace data.py:make --hz 0
pace data.py:make --hz fast
pace data.py:make --hz 1,2,3,4,5,6,7,8,9
pace data.py:make --duration 0
pace data.py:make --setup data.py
pace data.py:make --fix magic
pace data.py:make -- cat
pace --setup data.py:make -- cat
pace --undo data.py:make
pace -- absent-command
doctor extra
doctor --only nonsense
doctor --skip nonsense
doctor --only ''
doctor --skip ,
doctor --only script --script other.json
doctor --script absent.py
doctor --script folder
doctor --script binary.py
doctor --data absent
doctor --machine absent.json
doctor --machine other.json
doctor --machine other.json --record new.json
doctor --cpu --only gpu
doctor --output taken.txt
calibrate extra
calibrate --time-limit 0
calibrate --rehearse 'RTX 9999'
calibrate --rehearse a100-80gb-sxm --output taken.txt
calibrate --rehearse T4 --other-processes 99GiB
show
show absent.json
show folder
show other.json
show truncated.json
show nothing.json
show ''
show binary.py
show broken.zip
show list.json
show newer.json
show other.json extra.json
report
report absent.json
report other.json
report truncated.json -o page.html
report other.json -o page.docx
report other.json --format docx
report folder
completion
completion tcsh
completion bash zsh
""".strip().splitlines()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With files of every wrong kind."""
    made = tmp_path_factory.mktemp("bad")
    (made / "train.py").write_text("open('it-ran', 'w')\n")
    (made / "data.py").write_text("NUMBER = 3\ndef make():\n    return 1\n")
    (made / "broken.py").write_text("def act(:\n")
    (made / "empty.py").touch()
    (made / "leaves.py").write_text("import os\nos._exit(3)\n")
    (made / "refuses.py").write_text("import sys\nsys.exit('no data: give --data')\n")
    (made / "train.sh").write_text("python train.py\n")
    (made / "taken.txt").write_text("mine\n")
    (made / "binary.py").write_bytes(bytes(range(256)) * 8)
    (made / "broken.zip").write_bytes(b"PK\x03\x04" + bytes(200))
    (made / "nothing.json").touch()
    (made / "other.json").write_text('{"name": "someone else\'s"}\n')
    (made / "list.json").write_text("[1, 2, 3]\n")
    document = {"format": "trainfit-plan", "version": 999, "command": "python train.py"}
    (made / "newer.json").write_text(json.dumps(document))
    (made / "truncated.json").write_text('{"format": "trainfit-plan", "version": 1, "com')
    (made / "folder").mkdir()
    (made / "full").mkdir()
    (made / "full" / "file.txt").write_text("mine\n")
    return made


def words_of(line: str) -> list[str]:
    """As bash would read it, with bytes that are no UTF-8 in ``$'\\xff'``."""
    spelled = line.replace("$'\\xff'", "\udcff").replace("$'tr\\xffin.py'", "tr\udcffin.py")
    return shlex.split(spelled)


def test_there_are_enough_of_every_verb() -> None:
    assert len(LINES) == len(set(LINES)) > 200
    for verb in VERBS:
        assert sum(line.split(" ")[0] == verb for line in LINES) >= 3, verb
    assert sum("\udcff" in "".join(words_of(line)) for line in LINES) == 3


@pytest.fixture
def imports(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Iterator[None]:
    """What a call of pace imports of the folder in this process does not stay. Libraries do: numpy
    cannot be imported twice."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if folder in Path(getattr(sys.modules[name], "__file__", None) or "/").parents:
            del sys.modules[name]


@pytest.mark.usefixtures("warm_measuring", "imports")
@pytest.mark.parametrize("line", LINES)
def test_it_is_refused_in_three_lines(line: str, folder: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    words = words_of(line)
    done = called_here(words, folder) if words[:1] == ["pace"] else trainfit(*words, cwd=folder)
    assert done.returncode == 2, done.stdout + done.stderr
    said = [each for each in done.stderr.splitlines() if not each.endswith(" …")]
    assert 1 <= len(said) <= 3, done.stderr
    assert "Traceback" not in done.stderr and "\\x0a" not in done.stderr
    assert all(len(each) < 500 for each in said), done.stderr
    made = {path: path.stat().st_mtime_ns for path in folder.rglob("*")
            if "__pycache__" not in path.parts}  # fmt: skip
    assert {path: at for path, at in before.items() if "__pycache__" not in path.parts} == made


@pytest.mark.parametrize(
    ("line", "meant"),
    [
        ("paln -- x", "'plan'"),
        ("wacth -- x", "'watch'"),
        ("plan --gpus a100 -- x", "'--gpu'"),
        ("plan --batch_size 3 -- x", "'--batch_size'; an option of your script goes behind"),
        ("gpus --batch_size 3", "unknown option '--batch_size'"),
        ("plan -o", "-o needs a value: -o FILE"),
        ("doctor -o", "-o needs a value: -o FILE"),
        ("loader --step-tiem 1ms -- x", "'--step-time'"),
        ("watch --explan -- x", "'--explain'"),
        ("verify --rec x", "'--recommended'"),
        ("batch explain --noise 3", "'--noise-scale'"),
        ("completion tcsh", "'bash', 'zsh', 'fish'"),
        ("plan --gpu -- x", "--gpu needs a value: --gpu NAME"),
        ("pace --hz", "--hz needs a value: --hz HZ,…"),
        ("train.py --epochs 3", "trainfit plan -- python train.py --epochs 3"),
        ("python train.py", "trainfit plan -- python train.py"),
        ("--gpu x plan", "options go behind the command"),
        ("plan --step-time -5ms -- x", "such as 0.04 or 40ms, got '-5ms'"),
    ],
)
def test_what_was_meant(line: str, meant: str, tmp_path: Path) -> None:
    done = trainfit(*line.split(), cwd=tmp_path)
    assert done.returncode == 2 and meant in done.stderr.splitlines()[-1], done.stderr


@pytest.mark.parametrize("verb", VERBS)
def test_an_error_has_the_usage_of_its_own_verb(verb: str, tmp_path: Path) -> None:
    usage, error = trainfit(verb, "--xyzzy", cwd=tmp_path).stderr.splitlines()
    assert usage.startswith(f"usage: trainfit {verb} ") and f"trainfit {verb} --help" in usage
    assert error == f"trainfit {verb}: error: unknown option '--xyzzy'"


@pytest.mark.parametrize("verb", VERBS)
def test_options_have_headings(verb: str, tmp_path: Path) -> None:
    done = trainfit(verb, "--help", cwd=tmp_path)
    assert done.returncode == 0
    headings = [line for line in done.stdout.splitlines() if line.endswith(":") and line[0] != " "]
    options = sum(line.startswith("  -") for line in done.stdout.splitlines())
    assert len(headings) >= (3 if options > 8 else 1), done.stdout
    assert trainfit("help", verb, cwd=tmp_path).stdout == done.stdout


def test_the_command_alone_says_what_to_type(tmp_path: Path) -> None:
    done = trainfit(cwd=tmp_path)
    assert done.returncode == 2 and not done.stdout
    assert "start with:   trainfit plan" in done.stderr and len(done.stderr.splitlines()) == 3
    whole = trainfit("--help", cwd=tmp_path)
    assert whole.returncode == 0 and all(f"  {verb} " in whole.stdout for verb in VERBS)
    assert max(map(len, whole.stdout.splitlines())) <= 80


def test_a_word_of_a_shell_with_another_encoding(tmp_path: Path) -> None:
    """Through a real process, whose arguments the system decodes."""
    name = os.fsdecode(b"tr\xffin.py")
    done = trainfit("plan", "--gpu", "T4", "--", "python", name, cwd=tmp_path, LC_ALL="C")
    assert done.returncode == 2 and "Traceback" not in done.stderr


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="Linux has it")
@pytest.mark.parametrize("words", ["plan --help", "help memory", "--help", "--version"])
def test_help_that_cannot_be_written_is_an_error(words: str) -> None:
    command = [sys.executable, "-m", "trainfit", *words.split()]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2
    assert done.stderr == "trainfit: error: No space left on device\n"
