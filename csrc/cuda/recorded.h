// SPDX-License-Identifier: Apache-2.0
// What a caller's stream held at one moment.
#pragma once

#include "pending.h"

namespace kvlc {

class Recorded : public Pending {
  public:
    Recorded(Device &device, cudaStream_t stream);
    ~Recorded() override;

    void wait() const override;
    bool is_complete() const override { return is_over(event_); }
    void finish() const override {}
    void hold_back(cudaStream_t stream) const override;
    void digests(uint32_t *crcs, uint64_t count) const override;

    cudaStream_t stream() const { return stream_; }

  private:
    cudaStream_t stream_;
    cudaEvent_t event_;
};

}  // namespace kvlc
