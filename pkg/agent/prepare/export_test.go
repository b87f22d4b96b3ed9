package prepare

import "context"

// LockGPU takes a GPU's lock as another agent would.
func LockGPU(m *Manager, gpu string) (unlock func(), err error) {
	return m.locks.lockGPUs(context.Background(), []string{gpu})
}
