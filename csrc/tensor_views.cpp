// SPDX-License-Identifier: Apache-2.0
#include "tensor_views.h"

#include <cstdlib>
#include <cstring>

#include "dlpack.h"
#include "failure.h"

namespace kvl {
namespace {

// Never freed: the last tensors are freed while the process ends.
kvl_interpreter interpreter{};

// One tensor, with its sizes and strides behind it, until the framework frees its memory.
struct OwnedTensor {
    ManagedTensor managed;
    void *owner;
};

void free_owned(ManagedTensor *managed) {
    auto owned = static_cast<OwnedTensor *>(managed->context);
    if (interpreter.is_initialized()) {  // else the process ends, and all its memory with it
        int state = interpreter.lock();
        interpreter.drop(owned->owner);
        interpreter.unlock(state);
    }
    free(owned);
}

OwnedTensor *make_owned(char *data, const kvl_piece &piece, void *owner) {
    size_t sizes_nbytes = piece.rank * sizeof(int64_t);
    auto owned = static_cast<OwnedTensor *>(malloc(sizeof(OwnedTensor) + 2 * sizes_nbytes));
    if (!owned) fail(KVL_ENOMEM, "out of memory");
    auto sizes = reinterpret_cast<int64_t *>(owned + 1), strides = sizes + piece.rank;
    if (piece.rank) memcpy(sizes, piece.sizes, sizes_nbytes);
    int64_t stride = 1;
    for (uint64_t i = piece.rank; i-- > 0; stride *= sizes[i]) strides[i] = stride;
    owned->managed = {1, 0, owned, free_owned, 0, {}};
    DenseTensor &tensor = owned->managed.tensor;
    tensor.data = data + piece.start;
    tensor.device_type = kHost;
    tensor.rank = int32_t(piece.rank);
    tensor.code = uint8_t(piece.dtype);
    tensor.bits = uint8_t(piece.dtype >> 8);
    tensor.lanes = uint16_t(piece.dtype >> 16);
    tensor.sizes = sizes;
    tensor.strides = strides;
    owned->owner = owner;
    interpreter.keep(owner);
    return owned;
}

}  // namespace

void set_interpreter(const kvl_interpreter &found) { interpreter = found; }

int make_views(char *data, uint64_t nbytes, const kvl_layout &layout, uint64_t first,
               uint64_t count, void *owner, void *list, kvl_make make, uint64_t &number) {
    if (!interpreter.is_initialized) fail(KVL_EARGUMENT, "no interpreter is set");
    if (first > layout.count || count > layout.count - first)
        fail(KVL_EARGUMENT, "tensors that the layout does not have");
    for (; number < count; number++) {
        const kvl_piece &piece = layout.pieces[first + number];
        if (piece.start > nbytes || piece.nbytes > nbytes - piece.start)
            fail(KVL_EBOUNDS, "a tensor behind the payload's end");
        OwnedTensor *owned = make_owned(data, piece, owner);
        void *object = nullptr;
        // Who has the memory after a failure is not known. To free it twice would be worse.
        if (make(&owned->managed, &object)) return KVL_EUNSUPPORTED;
        if (interpreter.set_item(list, int64_t(number), object)) return KVL_EUNSUPPORTED;
    }
    return KVL_OK;
}

}  // namespace kvl
