// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

//go:build !nosim

package nvml

import "stowage.dev/stowage/pkg/nvmlsim"

// profiles are the names of simulated machines.
func profiles() []string { return nvmlsim.Profiles() }

func openMachine(profile string, opts OpenOptions) (*nvmlsim.Machine, error) {
	p, err := nvmlsim.LoadProfile(profile)
	if err != nil {
		return nil, err
	}
	if opts.SimDir == "" {
		return nvmlsim.NewMachine(p, opts.NodeName), nil
	}
	return nvmlsim.OpenMachine(p, opts.NodeName, opts.SimDir)
}
