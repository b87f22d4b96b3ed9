// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

//go:build nosim

package nvml

import (
	"errors"

	"stowage.dev/stowage/pkg/nvmlsim"
)

// profiles are the names of simulated machines.
func profiles() []string { return []string{"those of a build that simulates"} }

func openMachine(string, OpenOptions) (*nvmlsim.Machine, error) {
	return nil, errors.New("this agent is built without simulated GPUs, as those for real ones are: take the image node-agent-simulated")
}
