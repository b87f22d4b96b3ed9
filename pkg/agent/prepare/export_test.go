// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package prepare

import (
	"context"

	"k8s.io/apimachinery/pkg/types"
)

// LockGPU takes a GPU's lock as another agent would.
func LockGPU(m *Manager, gpu string) (unlock func(), err error) {
	call := m.locks.Begin()
	return call.Unlock, call.GPUs(context.Background(), gpu)
}

// LockClaim takes a claim's lock as another agent would.
func LockClaim(m *Manager, uid types.UID) (unlock func(), err error) {
	call := m.locks.Begin()
	return call.Unlock, call.Claim(context.Background(), uid)
}
