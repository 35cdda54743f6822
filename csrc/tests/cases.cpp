// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <numeric>

#include "check.h"

namespace {

// Strides with gaps, in a random order of dimensions, so that some are transposed.
uint64_t lay_strides(Random &random, Case &made, int first, uint64_t reach) {
    std::vector<int> order;
    for (int d = first; d < KVL_DIMS; d++) order.push_back(d);
    if (random.number(0, 2))
        std::reverse(order.begin(), order.end());
    else
        std::shuffle(order.begin(), order.end(), random.engine());
    for (int d : order) {
        uint64_t gap = random.number(0, 1) ? 0 : random.number(0, 70);
        made.view.strides[d] = int64_t(reach + gap);
        reach += (made.view.sizes[d] - 1) * uint64_t(made.view.strides[d]);
    }
    return reach;
}

void lay_index(Random &random, Case &made, uint64_t entry) {
    kvl_view &view = made.view;
    bool slots = random.number(0, 1);
    view.index_split = slots ? random.number(1, 8) : 1;
    uint64_t limit = view.sizes[0] + random.number(0, 10);
    view.index_limit = limit;
    view.index_stride = slots ? int64_t(entry + random.number(0, 20)) : 0;
    uint64_t block = (view.index_split - 1) * uint64_t(view.index_stride) + entry;
    view.strides[0] = int64_t(block + random.number(0, 30));
    made.index.resize(limit);
    std::iota(made.index.begin(), made.index.end(), 0);
    if (random.number(0, 3)) std::shuffle(made.index.begin(), made.index.end(), random.engine());
    view.index = made.index.data();
}

}  // namespace

Case random_case(Random &random, bool distinct) {
    Case made;
    kvl_view &view = made.view;
    const uint64_t runs[] = {1, 2, 4, 8, 16, 63, 64, 130, 256, 512, 1000, 4096, 70000};
    view.run = runs[random.number(0, std::size(runs) - 1)];
    uint64_t total = view.run;
    for (int d = 0; d < KVL_DIMS; d++) {
        view.sizes[d] = random.number(0, 1) ? 1 : random.number(1, total < 100000 ? 24 : 3);
        total *= view.sizes[d];
    }
    bool indexed = random.number(0, 1);
    uint64_t reach = lay_strides(random, made, indexed ? 1 : 0, view.run);
    if (indexed) lay_index(random, made, reach);
    uint64_t outer = indexed ? (view.index_limit - 1) / view.index_split * view.strides[0] : 0;
    uint64_t inner = indexed ? (view.index_split - 1) * view.index_stride : 0;
    if (!indexed && !distinct && random.number(0, 3) == 0) view.strides[0] = 0;  // expanded
    view.offset = int64_t(random.number(0, 80));
    made.memory = random.bytes(uint64_t(view.offset) + reach + outer + inner);
    view.base = made.memory.data();
    view.extent = made.memory.size();
    made.nbytes = total;
    if (indexed) made.nbytes -= random.number(0, total / view.sizes[0] - 1);
    return made;
}
