// SPDX-License-Identifier: Apache-2.0
#include "header.h"

#include <cstring>
#include <initializer_list>

#include "dlpack.h"
#include "failure.h"
#include "kernel.h"

namespace kvl {
namespace {

constexpr uint64_t kDigits = 8;    // of a CRC
constexpr uint64_t kLength = 8;    // bytes of the field before the text
constexpr char kQuote[] = "\\\"";  // as it stands inside a string of JSON
constexpr uint64_t kQuoteBytes = sizeof kQuote - 1;

uint32_t crc32c(uint32_t crc, const char *data, uint64_t nbytes) {
    return ~kernel().crc(~crc, data, nbytes);
}

void write_digits(char *at, uint32_t crc) {
    for (int shift = 28; shift >= 0; shift -= 4) *at++ = "0123456789abcdef"[crc >> shift & 15];
}

bool is_digit(char c) { return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f'); }

bool is_id_character(char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') ||
           (c && strchr("0123456789_.:/@+=,-", c));
}

bool is_within(uint64_t start, uint64_t nbytes, uint64_t limit) {
    return start <= limit && nbytes <= limit - start;
}

bool overlap(const char *a, const char *b, uint64_t a_nbytes, uint64_t b_nbytes) {
    auto first = reinterpret_cast<uintptr_t>(a), second = reinterpret_cast<uintptr_t>(b);
    return first < second + b_nbytes && second < first + a_nbytes;
}

bool is_valid(const kvl_layout &layout) {
    return layout.before && layout.after && (layout.pieces || !layout.count) &&
           is_within(layout.crc, kDigits, layout.before_nbytes) &&
           is_within(layout.digests, layout.digests_nbytes, layout.after_nbytes);
}

// The tensors behind the header, and their digests in its text.
void copy_pieces(char *payload, uint64_t total, uint64_t header, char *after,
                 const kvl_layout &layout, const void *const *sources, uint64_t &number) {
    char *data = payload + header;
    uint64_t nbytes = total - header, at = 0;
    for (; number < layout.count; number++) {
        const kvl_piece &piece = layout.pieces[number];
        auto source = static_cast<const char *>(sources[number]);
        if (piece.start < at || !is_within(piece.start, piece.nbytes, nbytes))
            fail(KVL_EBOUNDS, "bytes %llu to %llu of %llu", (unsigned long long)piece.start,
                 (unsigned long long)(piece.start + piece.nbytes), (unsigned long long)nbytes);
        if (piece.nbytes && !source) fail(KVL_EARGUMENT, "a null pointer");
        if (overlap(payload, source, total, piece.nbytes))
            fail(KVL_EOVERLAP, "a tensor lies where it is copied to");
        memset(data + at, 0, piece.start - at);
        if (piece.nbytes) memcpy(data + piece.start, source, piece.nbytes);
        at = piece.start + piece.nbytes;
        if (piece.digest == KVL_NO_DIGEST) continue;
        if (!is_within(piece.digest, kDigits, layout.after_nbytes) || piece.nbytes > KVL_CHUNK)
            fail(KVL_EBOUNDS, "a digest of %llu bytes at %llu", (unsigned long long)piece.nbytes,
                 (unsigned long long)piece.digest);
        // Of the copy: another thread may write to the source.
        write_digits(after + piece.digest, crc32c(0, data + piece.start, piece.nbytes));
    }
    memset(data + at, 0, nbytes - at);
}

// Whether a tensor is contiguous, on the host, and of a piece's dtype and sizes.
bool is_dense(const DenseTensor &tensor, const kvl_piece &piece) {
    uint64_t dtype = tensor.code | tensor.bits << 8 | uint64_t{tensor.lanes} << 16;
    if (tensor.device_type != kHost || dtype != piece.dtype || tensor.rank < 0 ||
        uint64_t(tensor.rank) != piece.rank)
        return false;
    int64_t stride = 1;
    for (int32_t i = tensor.rank; i-- > 0; stride *= tensor.sizes[i]) {
        if (tensor.sizes[i] != piece.sizes[i]) return false;
        if (tensor.sizes[i] != 1 && tensor.strides && tensor.strides[i] != stride) return false;
    }
    return true;
}

// Whether a text is the layout's before and behind its quoted request id, and has its own CRC.
// There is space for both.
bool matches_around(const char *text, uint64_t nbytes, const kvl_layout &layout,
                    uint64_t quoted_id_nbytes) {
    uint64_t behind = layout.crc + kDigits, stop = layout.digests + layout.digests_nbytes;
    const char *after = text + layout.before_nbytes + quoted_id_nbytes, *end = text + nbytes;
    if (memcmp(text, layout.before, layout.crc) ||
        memcmp(text + behind, layout.before + behind, layout.before_nbytes - behind) ||
        memcmp(after, layout.after, layout.digests) ||
        memcmp(after + stop, layout.after + stop, layout.after_nbytes - stop))
        return false;
    for (uint64_t at = layout.digests; at < stop; at++)
        if (layout.after[at] == '0' ? !is_digit(after[at]) : after[at] != layout.after[at])
            return false;
    for (const char *pad = after + layout.after_nbytes; pad < end; pad++)
        if (*pad != ' ') return false;
    char digits[kDigits];
    uint32_t crc = crc32c(0, layout.before, behind);
    write_digits(digits, crc32c(crc, text + behind, nbytes - behind));
    return !memcmp(text + layout.crc, digits, kDigits);
}

}  // namespace

void pack(char *payload, uint64_t nbytes, uint64_t header_nbytes, const kvl_layout &layout,
          const char *quoted_id, uint64_t quoted_id_nbytes, const void *const *sources,
          uint64_t &piece) {
    if (!is_valid(layout)) fail(KVL_EARGUMENT, "a layout that is none");
    if (header_nbytes > nbytes || header_nbytes < kLength)
        fail(KVL_EBOUNDS, "a header of %llu bytes in a payload of %llu",
             (unsigned long long)header_nbytes, (unsigned long long)nbytes);
    uint64_t space = header_nbytes - kLength, text = 0;
    for (uint64_t part : {layout.before_nbytes, quoted_id_nbytes, layout.after_nbytes}) {
        if (part > space - text)
            fail(KVL_EBOUNDS, "the text does not fit into a header of %llu bytes",
                 (unsigned long long)header_nbytes);
        text += part;
    }
    for (uint64_t i = 0; i < kLength; i++) payload[i] = char(space >> 8 * i);
    char *before = payload + kLength, *id = before + layout.before_nbytes;
    char *after = id + quoted_id_nbytes;
    memcpy(before, layout.before, layout.before_nbytes);
    memcpy(id, quoted_id, quoted_id_nbytes);
    memcpy(after, layout.after, layout.after_nbytes);
    memset(before + text, ' ', space - text);
    copy_pieces(payload, nbytes, header_nbytes, after, layout, sources, piece);
    write_digits(before + layout.crc, crc32c(0, before, space));
}

bool pack_tensors(char *payload, uint64_t nbytes, uint64_t header_nbytes, const kvl_layout &layout,
                  const char *id, uint64_t id_nbytes, void *const *objects, kvl_describe describe,
                  uint64_t &piece) {
    if (layout.count > KVL_MAX_TENSORS || !id_nbytes || id_nbytes > KVL_MAX_ID) return false;
    char quoted[KVL_MAX_ID + 2 * kQuoteBytes];
    memcpy(quoted, kQuote, kQuoteBytes);
    for (uint64_t i = 0; i < id_nbytes; i++) {
        if (!is_id_character(id[i])) return false;
        quoted[kQuoteBytes + i] = id[i];
    }
    memcpy(quoted + kQuoteBytes + id_nbytes, kQuote, kQuoteBytes);
    const void *sources[KVL_MAX_TENSORS];
    for (uint64_t i = 0; i < layout.count; i++) {
        DenseTensor tensor;
        if (describe(objects[i], &tensor) || !is_dense(tensor, layout.pieces[i])) return false;
        sources[i] = static_cast<char *>(tensor.data) + tensor.byte_offset;
    }
    pack(payload, nbytes, header_nbytes, layout, quoted, id_nbytes + 2 * kQuoteBytes, sources,
         piece);
    return true;
}

uint64_t match(const char *text, uint64_t nbytes, const kvl_layout &layout) {
    uint64_t fixed = layout.before_nbytes + layout.after_nbytes + 2 * kQuoteBytes;
    if (!is_valid(layout) || nbytes < fixed) return 0;
    uint64_t most = nbytes - fixed < KVL_MAX_ID ? nbytes - fixed : KVL_MAX_ID, length = 0;
    const char *id = text + layout.before_nbytes;
    if (memcmp(id, kQuote, kQuoteBytes)) return 0;
    id += kQuoteBytes;
    while (length < most && is_id_character(id[length])) length++;
    if (memcmp(id + length, kQuote, kQuoteBytes)) return 0;
    return matches_around(text, nbytes, layout, length + 2 * kQuoteBytes) ? length : 0;
}

bool is_packed(const char *payload, uint64_t nbytes, uint64_t header_nbytes,
               const kvl_layout &layout, const char *quoted_id, uint64_t quoted_id_nbytes,
               bool with_digests) {
    if (!is_valid(layout) || header_nbytes > nbytes || header_nbytes < kLength) return false;
    uint64_t space = header_nbytes - kLength, fixed = layout.before_nbytes + layout.after_nbytes;
    if (!is_within(fixed, quoted_id_nbytes, space)) return false;
    for (uint64_t i = 0; i < kLength; i++)
        if (payload[i] != char(space >> 8 * i)) return false;
    const char *text = payload + kLength, *id = text + layout.before_nbytes;
    if (memcmp(id, quoted_id, quoted_id_nbytes) ||
        !matches_around(text, space, layout, quoted_id_nbytes))
        return false;
    const char *after = id + quoted_id_nbytes, *data = payload + header_nbytes;
    for (uint64_t number = 0; with_digests && number < layout.count; number++) {
        const kvl_piece &piece = layout.pieces[number];
        if (!is_within(piece.start, piece.nbytes, nbytes - header_nbytes)) return false;
        if (piece.digest == KVL_NO_DIGEST) continue;
        if (!is_within(piece.digest, kDigits, layout.after_nbytes) || piece.nbytes > KVL_CHUNK)
            return false;
        char digits[kDigits];
        write_digits(digits, crc32c(0, data + piece.start, piece.nbytes));
        if (memcmp(after + piece.digest, digits, kDigits)) return false;
    }
    return true;
}

}  // namespace kvl
