"""Number formats, rotary constants and the file format."""
import sys
import tempfile
import unittest
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from kdtr import tiny  # noqa: E402
from kdtr.format import Bundle, FormatError, Golden, Weight, load_tensors, save_tensors  # noqa: E402
from kdtr.numerics import (bf16_bits, bf16_values, dequantize_w4a16, pack, quantize_w4a16,  # noqa: E402
                           round_bf16, unpack)
from kdtr.reference import Arithmetic, attend, softmax_weights  # noqa: E402
from kdtr.rotary import softmax_scale, yarn_frequencies  # noqa: E402


class Bf16(unittest.TestCase):
    def test_every_pattern_survives(self):
        bits = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)
        values = bf16_values(bits)
        number = ~np.isnan(values)
        self.assertTrue((bf16_bits(values)[number] == bits[number]).all())
        self.assertTrue(np.isnan(bf16_values(bf16_bits(values[~number]))).all())

    def test_ties_go_to_even(self):
        x = np.array([1 + 2 ** -8, 1 + 3 * 2 ** -8, -(1 + 2 ** -8), 3.4e38, 1 + 2 ** -8 + 2 ** -20], np.float32)
        self.assertEqual(round_bf16(x).tolist(), [1.0, 1 + 2 ** -6, -1.0, np.inf, 1 + 2 ** -7])


class Int4(unittest.TestCase):
    def test_worked_example(self):
        """compressed-tensors pack-quantized: eight codes are the little-endian bytes of word 0xDA7F9850."""
        q = np.array([[-8, -3, 0, 1, 7, -1, 2, 5]])
        self.assertEqual(pack(q).tobytes().hex(), "50987fda")
        self.assertEqual(pack(q).view("<i4").item(), -629172144)
        self.assertEqual(dequantize_w4a16(unpack(pack(q)), np.array([[0.5]], np.float32)).tolist(),
                         [[-4, -1.5, 0, 0.5, 3.5, -0.5, 1, 2.5]])

    def test_round_trip(self):
        rng = np.random.default_rng(1)
        for group, fmt in ((32, "bf16"), (32, "f32"), (64, "bf16"), (128, "f32")):
            w = rng.standard_normal((17, 256)).astype(np.float32)
            w[3, :group] = 0
            q, s = quantize_w4a16(w, group, fmt)
            self.assertEqual((q.min(), q.max()), (-8, 7))
            self.assertTrue((unpack(pack(q)) == q).all())
            again, _ = quantize_w4a16(dequantize_w4a16(q, s), group, "f32")
            self.assertTrue((dequantize_w4a16(q, s)[3, :group] == 0).all())
            self.assertLessEqual(np.abs(again.astype(int) - q).max(), 1)
            error = np.abs(dequantize_w4a16(q, s) - w).reshape(17, -1, group)
            self.assertTrue((error <= 1.01 * np.abs(s)[..., None]).all())

    def test_group_must_divide(self):
        with self.assertRaisesRegex(ValueError, "group size"):
            quantize_w4a16(np.zeros((2, 48), np.float32))


class Yarn(unittest.TestCase):
    """Constants of the large model, computed independently of this code from the published settings."""

    def test_frequencies(self):
        w = yarn_frequencies(64, 50000.0, tiny.CONFIG["rope_scaling"])
        known = {0: 1, 1: 0.713111085, 8: 0.0668740305, 9: 0.0437766560, 19: 1.58374991e-4, 20: 1.80702339e-5,
                 31: 4.38220646e-7}
        for i, value in known.items():
            self.assertLess(abs(w[i] / value - 1), 2e-8, i)

    def test_scale(self):
        self.assertAlmostEqual(softmax_scale(tiny.CONFIG), 0.144679625802689, delta=1e-15)


class Softmax(unittest.TestCase):
    def test_any_base_gives_the_same_weights(self):
        s = np.random.default_rng(3).standard_normal((40, 300)).astype(np.float32) * 9
        whole, first = softmax_weights(s), softmax_weights(s[:, :64])
        factor = first / whole[:, :64]
        self.assertTrue((factor == factor[:, :1]).all())
        self.assertTrue((np.log2(factor) == np.round(np.log2(factor))).all())
        self.assertTrue((factor > 1).any())

    def test_rounding_adds_no_weight(self):
        rng = np.random.default_rng(4)
        q, keys, mask = rng.standard_normal((5, 64)), rng.standard_normal((90, 64)), np.zeros((5, 90))
        ones = attend(Arithmetic(np.float64), q, keys, np.ones((90, 3)), 0.2, mask)
        self.assertLess(np.abs(ones - 1).max(), 1e-12)
        mask[:, 1:] = -np.inf
        values = round_bf16(rng.standard_normal((90, 3)))
        alone = attend(Arithmetic(np.float64), q, keys, values, 0.2, mask)
        self.assertTrue((alone == values[0]).all())


    def test_error_of_one_query(self):
        """What docs/tree-attention.md says of random values: scores of 1.2 units, 128 keys."""
        rng = np.random.default_rng(5)
        errors = []
        for _ in range(2000):
            s, values = rng.standard_normal((1, 128)) * 1.2 / np.log(2), rng.uniform(-1, 1, (128, 128))
            p, exact = softmax_weights(s), np.exp2(s)
            want = exact @ values / exact.sum()
            errors.append(np.linalg.norm(p @ values / p.sum() - want) / np.linalg.norm(want))
        half, hundredth, worst = np.quantile(errors, (0.5, 0.99, 1))
        self.assertLess(half, 1.6e-3)
        self.assertLess(hundredth, 2.6e-3)
        self.assertLess(worst, 2 ** -8)


class File(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.path = Path(folder.name) / "x.kdtr"
        rng = np.random.default_rng(2)
        w = rng.standard_normal((4, 64)).astype(np.float32)
        weights = {"a": Weight.encode(w, "f32"), "b": Weight.encode(w, "bf16"),
                   "c": Weight.encode(w, "w4a16"), "d": Weight.encode(w, "w4a16", "f32", 64)}
        golden = Golden(np.arange(3, dtype=np.int32), np.arange(2, dtype=np.int32), np.ones(2, np.float32))
        self.bundle = Bundle({"x": 1}, {"name": "x"}, weights, [golden], vocabulary=b"IQ== 0\n")

    def test_round_trip(self):
        self.bundle.write(self.path)
        first = self.path.read_bytes()
        back = Bundle.read(self.path)
        for name, w in self.bundle.weights.items():
            self.assertTrue((back.weights[name].dense() == w.dense()).all())
            self.assertEqual(back.weights[name].entry(), w.entry())
        self.assertEqual(back.vocabulary, b"IQ== 0\n")
        back.write(self.path)
        self.assertEqual(first, self.path.read_bytes())

    def test_other_readers_open_it(self):
        try:
            from safetensors import safe_open
        except ImportError:
            self.skipTest("the package safetensors is not installed")
        self.bundle.write(self.path)
        with safe_open(self.path, "np") as f:
            self.assertEqual(f.metadata()["format"], "kdtr")
            self.assertTrue((f.get_tensor("c.qw") == self.bundle.weights["c"].data).all())

    def test_damage_is_named(self):
        self.bundle.write(self.path)
        blob = bytearray(self.path.read_bytes())
        blob[-1] ^= 1
        self.path.write_bytes(blob)
        with self.assertRaisesRegex(FormatError, "blake3"):
            Bundle.read(self.path)

    def test_manifest_is_law(self):
        self.bundle.write(self.path)
        tensors, meta = load_tensors(self.path)
        for old, new in (('"format":"bf16"', '"format":"f32"'), ('"group":64', '"group":32'), ("[4,64]", "[4,32]")):
            save_tensors(self.path, tensors, meta | {"manifest": meta["manifest"].replace(old, new, 1)})
            with self.assertRaisesRegex(FormatError, "expected"):
                Bundle.read(self.path)
        del tensors["c.sc"]
        save_tensors(self.path, tensors, meta)
        with self.assertRaisesRegex(FormatError, "c.sc"):
            Bundle.read(self.path)


if __name__ == "__main__":
    unittest.main()
