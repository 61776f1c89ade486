"""How the products of many layers are divided among threads and guests."""

import os
import subprocess
from pathlib import Path

import pytest

from engine.native.compilers import compilers
from engine.native.library import SOURCES, native_library

pytestmark = pytest.mark.skipif(
    native_library() is None or not compilers(os.environ), reason="needs a C++ compiler"
)

PARTS = """
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>

#include "products.h"

struct Layer {
    int64_t num_outputs, num_inputs;
};

// Arguments: threads, whether guests may come, outputs, inputs, and the rows of each layer.
int main(int num_arguments, char **arguments) {
    const auto number = [&](int i) { return std::atoll(arguments[i]); };
    const int file = memfd_create("cpus", 0);
    if (ftruncate(file, LentCpus::MOST_CPUS * sizeof(LentCpu)) != 0) return 1;
    const int64_t own[] = {1023}, others[] = {1022};  // which nobody lends
    if (LentCpus::of_process().open(file, own, 1, others, 1) != 0) return 1;
    if (number(2) != 0) LentCpus::of_process().begin_step();
    const Layer layer{number(3), number(4)};
    std::vector<const Layer *> layers;
    std::vector<int64_t> firsts{0};
    for (int i = 5; i < num_arguments; ++i) layers.push_back(&layer), firsts.push_back(firsts.back() + number(i));
    std::vector<char> rows(firsts.back());
    std::mutex mutex;
    const products::Rows all{rows.data(), 1, BFLOAT16};
    products::multiply_each(
        layers.data(), firsts.data(), layers.size(), all, all, static_cast<int>(number(1)),
        [&](const Layer &, const products::Rows &from, const products::Rows &, int64_t num_rows,
            const products::Share &share) {
            const int64_t first = (static_cast<char *>(from.values) - rows.data()) / 2;
            const std::lock_guard<std::mutex> lock(mutex);
            std::printf("%ld %ld %ld %ld\\n", (long)first, (long)num_rows, (long)share.begin(layer.num_outputs),
                        (long)share.end(layer.num_outputs));
        });
}
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prints the rows and the outputs of each part."""
    folder = tmp_path_factory.mktemp("parts")
    source, program = folder / "program.cpp", folder / "program"
    source.write_text(PARTS)
    compiler = compilers(os.environ)[0]
    flags = ("-std=c++17", "-pthread", f"-I{SOURCES}")
    subprocess.run([*compiler, *flags, str(source), "-o", str(program)], check=True)
    return program


def sizes_of_parts(
    program: Path, counts: list[int], outputs: int, inputs: int, num_threads: int, *, has_guests: bool = False
) -> list[int]:
    """Rows x outputs of each part, in any order. Together they must be all."""
    command = (program, num_threads, int(has_guests), outputs, inputs, *counts)
    text = subprocess.run(list(map(str, command)), check=True, capture_output=True, text=True).stdout
    parts = [tuple(map(int, line.split())) for line in text.splitlines()]
    found = sorted(
        (row, first, end) for begin, rows, first, end in parts for row in range(begin, begin + rows)
    )
    for row in range(sum(counts)):
        own = [(first, end) for each, first, end in found if each == row]
        assert [0, *(end for _, end in own)] == [*(first for first, _ in own), outputs], row
    return [rows * (end - first) for _, rows, first, end in parts]


@pytest.mark.parametrize(("num_threads", "num_layers"), [(2, 5), (3, 8), (4, 10), (6, 10), (16, 8)])
def test_threads_compute_nearly_the_same_for_one_token(
    program: Path, num_threads: int, num_layers: int
) -> None:
    """This holds for any number of threads, and of a token's experts."""
    sizes = sizes_of_parts(program, [0, *[1] * num_layers, 0], 1536, 2048, num_threads)
    busy = [0] * num_threads
    for size in sorted(sizes, reverse=True):  # as threads take them
        busy[busy.index(min(busy))] += size
    assert max(busy) <= 1.15 * sum(busy) / num_threads


def test_a_guests_part_is_small(program: Path) -> None:
    """A small part lets a worker get back its CPU soon. With many rows and inputs, even few outputs are many
    products."""
    counts, outputs, inputs = [700, 0, 30, 1], 4096, 14336
    sizes = sizes_of_parts(program, counts, outputs, inputs, 2, has_guests=True)
    assert max(sizes) * inputs < 66_000_000
    assert len(sizes_of_parts(program, counts, outputs, inputs, 2)) < len(sizes) / 4, "only for guests"
