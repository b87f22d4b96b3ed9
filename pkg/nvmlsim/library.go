package nvmlsim

import (
	"sync"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// Library is a simulated libnvidia-ml.so for one machine. It is safe for
// concurrent use.
type Library struct {
	unsupportedInterface

	profile  *Profile
	nodeName string
	devices  []*device

	mu       sync.RWMutex
	sessions int // Init calls without their Shutdown
}

var _ nvml.Interface = (*Library)(nil)

// New returns the simulated library of a machine of the given profile, a
// built-in name or the path of a YAML file. UUIDs and serial numbers follow
// from nodeName: the same name has the same GPUs over restarts, another name
// has others.
func New(profile, nodeName string) (*Library, error) {
	p, err := LoadProfile(profile)
	if err != nil {
		return nil, err
	}
	return NewFromProfile(p, nodeName), nil
}

// NewFromProfile is New for a profile that is loaded already. The profile must
// not be changed afterwards.
func NewFromProfile(p *Profile, nodeName string) *Library {
	l := &Library{profile: p, nodeName: nodeName}
	for i := range p.GPUs {
		l.devices = append(l.devices, newDevice(l, i))
	}
	return l
}

// Profile returns the machine's description; not to be changed.
func (l *Library) Profile() *Profile { return l.profile }

// Init opens a session. As with the real library, each Init needs a Shutdown.
func (l *Library) Init() nvml.Return {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.sessions++
	return nvml.SUCCESS
}

// InitWithFlags is Init: no flag changes what is simulated.
func (l *Library) InitWithFlags(uint32) nvml.Return { return l.Init() }

// Shutdown closes a session, or answers ERROR_UNINITIALIZED if none is open.
func (l *Library) Shutdown() nvml.Return {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.sessions == 0 {
		return nvml.ERROR_UNINITIALIZED
	}
	l.sessions--
	return nvml.SUCCESS
}

// ready answers ERROR_UNINITIALIZED outside of any session.
func (l *Library) ready() nvml.Return {
	l.mu.RLock()
	defer l.mu.RUnlock()
	if l.sessions == 0 {
		return nvml.ERROR_UNINITIALIZED
	}
	return nvml.SUCCESS
}
