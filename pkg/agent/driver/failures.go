package driver

import "sync"

// failures are what failed, so that what is tried every few seconds, and fails each time for the same reason, is logged once.
type failures struct {
	mu   sync.Mutex
	last map[string]string
}

// changed tells whether what has this name failed, and for another reason than the last time. Success, which is nil, forgets the reason.
func (f *failures) changed(name string, err error) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	if err == nil {
		delete(f.last, name)
		return false
	}
	if f.last[name] == err.Error() {
		return false
	}
	if f.last == nil {
		f.last = map[string]string{}
	}
	f.last[name] = err.Error()
	return true
}
