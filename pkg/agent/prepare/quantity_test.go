// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package prepare

import (
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"stowage.dev/stowage/pkg/agent/discovery"
)

// A share that another scheduler wrote may be a quantity that arithmetic and text do not end on.
func TestAShareOutOfBoundsIsRefused(t *testing.T) {
	for _, text := range []string{"1e2147483647", "0e2147483647", "1" + strings.Repeat("0", 300_000)} {
		result := &resourceapi.DeviceRequestAllocationResult{
			ConsumedCapacity: map[resourceapi.QualifiedName]resource.Quantity{discovery.CapacityMemory: resource.MustParse(text)},
		}
		if _, err := consumed("gpu.nvidia.com", result, discovery.CapacityMemory, 0); err == nil || len(err.Error()) > 200 {
			t.Errorf("%.20s: %v", text, err)
		}
	}
}
