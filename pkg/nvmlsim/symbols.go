// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package nvmlsim

import (
	"fmt"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// Extensions answers symbol lookups, by which go-nvlib and nvcdi find out what
// the library can do.
func (l *Library) Extensions() nvml.ExtendedInterface { return extensions{} }

type extensions struct{}

// symbols are the C functions behind the optional calls that are simulated.
// The ...V functions are missing on purpose: go-nvml answers those by calling
// into the C library.
var symbols = map[string]bool{
	"nvmlDeviceGetAddressingMode": true,
	"nvmlDeviceGetGpuFabricInfo":  true,
	"nvmlDeviceGetMemoryInfo_v2":  true,
	"nvmlDeviceGetMigMode":        true,
}

// LookupSymbol returns an error for a function that is not simulated.
func (extensions) LookupSymbol(name string) error {
	if symbols[name] {
		return nil
	}
	return fmt.Errorf("simulated NVML has no symbol %s", name)
}
