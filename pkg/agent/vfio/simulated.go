// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package vfio

import (
	"context"
	"fmt"
	"slices"

	"stowage.dev/stowage/pkg/nvmlsim"
)

// Simulated are the users of a simulated machine's GPUs.
type Simulated struct{ Machine *nvmlsim.Machine }

var _ Users = Simulated{}

// OfGPU implements Users.
func (s Simulated) OfGPU(ctx context.Context, minor int) ([]uint32, error) {
	return s.Of(ctx, fmt.Sprintf("/dev/nvidia%d", minor))
}

// Of implements Users. A library with an open session uses every GPU of the driver.
func (s Simulated) Of(_ context.Context, nodes ...string) ([]uint32, error) {
	var users []uint32
	state := s.Machine.State()
	for i := range state.GPUs {
		driver, group := s.Machine.Nodes(i)
		for _, process := range state.GPUs[i].Processes {
			node := driver
			if process.Kind == nvmlsim.ProcessVM {
				node = group
			}
			if slices.Contains(nodes, node) {
				users = append(users, process.PID)
			}
		}
		if slices.Contains(nodes, driver) && !state.GPUs[i].Detached() {
			users = append(users, s.Machine.Users()...)
			for _, client := range state.ClientsOf(i) {
				users = append(users, client.PID)
			}
		}
	}
	slices.Sort(users)
	return users, nil
}
