package prepare

import (
	"context"

	"k8s.io/apimachinery/pkg/types"
)

// LockGPU takes a GPU's lock as another agent would.
func LockGPU(m *Manager, gpu string) (unlock func(), err error) {
	locks := m.locks.begin()
	return locks.unlock, locks.gpus(context.Background(), gpu)
}

// LockClaim takes a claim's lock as another agent would.
func LockClaim(m *Manager, uid types.UID) (unlock func(), err error) {
	locks := m.locks.begin()
	return locks.unlock, locks.claim(context.Background(), uid)
}
