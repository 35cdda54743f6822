// SPDX-License-Identifier: Apache-2.0
// What a caller's stream held at one moment; counts as one copy.
#pragma once

#include "pending.h"

namespace kvlc {

class Recorded : public Pending {
  public:
    Recorded(Device &device, cudaStream_t stream);
    ~Recorded() override;

    void wait(uint64_t copy) const override;
    uint64_t complete() const override;
    void finish() const override {}
    void hold_back(cudaStream_t stream) const override;

    cudaStream_t stream() const { return stream_; }

  private:
    cudaStream_t stream_;
    cudaEvent_t event_;
};

}  // namespace kvlc
