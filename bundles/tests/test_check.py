"""make.py --check: passes on the shipped files, and names the difference in a damaged one."""
import dataclasses
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from kdtr.format import Bundle, Weight  # noqa: E402

NAME = "k26-tiny-int4"


class Check(unittest.TestCase):
    def run_check(self, folder, name=NAME):
        done = subprocess.run([sys.executable, ROOT / "make.py", "--check", "--only", name, "--out", folder],
                              capture_output=True, text=True)
        return done.returncode, done.stdout + done.stderr

    def damaged(self, change):
        """Exit code and output of a check on the bundle after `change`, written anew with fitting sums."""
        bundle = Bundle.read(ROOT / f"{NAME}.kdtr")
        change(bundle)
        with tempfile.TemporaryDirectory() as folder:
            bundle.write(Path(folder) / f"{NAME}.kdtr")
            return self.run_check(folder)

    def test_shipped_files_pass(self):
        for name in (NAME, "kernel-cases", "format-cases", "dflash-cases"):
            code, said = self.run_check(ROOT, name)
            self.assertEqual(code, 0, said)

    def test_changed_token(self):
        def change(bundle):
            golden = bundle.goldens[2]
            golden.tokens = golden.tokens.copy()
            golden.tokens[-1] ^= 1

        code, said = self.damaged(change)
        self.assertEqual(code, 1)
        self.assertRegex(said, "golden 2")

    def test_changed_gap(self):
        def change(bundle):
            gap = bundle.goldens[1].gap.copy()
            gap[7] += 1
            bundle.goldens[1].gap = gap

        code, said = self.damaged(change)
        self.assertEqual(code, 1)
        self.assertRegex(said, "golden 1: gap 7")

    def test_changed_code(self):
        name = "model.layers.1.mlp.experts.5.up_proj.weight"

        def change(bundle):
            w = bundle.weights[name]
            data = w.data.copy()
            data[3, 4] ^= 1
            bundle.weights[name] = dataclasses.replace(w, data=data)

        code, said = self.damaged(change)
        self.assertEqual(code, 1)
        self.assertRegex(said, name)

    def test_changed_format(self):
        name = "model.layers.2.mlp.experts.0.down_proj.weight"

        def change(bundle):
            bundle.weights[name] = Weight.encode(np.asarray(bundle.weights[name].dense()), "bf16")

        code, said = self.damaged(change)
        self.assertEqual(code, 1)
        self.assertRegex(said, name)

    def test_absent_file(self):
        with tempfile.TemporaryDirectory() as folder:
            self.assertEqual(self.run_check(folder)[0], 1)


if __name__ == "__main__":
    unittest.main()
