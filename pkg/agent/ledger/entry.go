package ledger

import (
	"encoding/json"
	"time"

	"k8s.io/apimachinery/pkg/types"
)

// State says how far the preparation of a claim has come.
type State string

const (
	// PrepareStarted: side effects may have happened, the kubelet was never told that the claim is ready.
	PrepareStarted State = "PrepareStarted"
	// PrepareCompleted: the kubelet may have been told, containers may run with the claim's GPUs.
	PrepareCompleted State = "PrepareCompleted"
)

// Entry is what is known of one claim. Fields are only ever added within a schema version.
type Entry struct {
	Claim   Claim     `json:"claim"`
	State   State     `json:"state"`
	Devices []Device  `json:"devices"`
	Updated time.Time `json:"updated"`

	// Undo lists the side effects in the order in which they are done, each recorded before it is done.
	// They are undone in reverse; undoing one that never happened must do nothing.
	Undo []Step `json:"undo,omitempty"`

	// CDISpec is the CDI specification as it was written for this claim, so that it can be put back
	// without NVML or the API server.
	CDISpec json.RawMessage `json:"cdiSpec,omitempty"`
}

// Claim names a ResourceClaim.
type Claim struct {
	UID       types.UID `json:"uid"`
	Namespace string    `json:"namespace"`
	Name      string    `json:"name"`
}

// String returns namespace/name (UID), for messages.
func (c Claim) String() string {
	return c.Namespace + "/" + c.Name + " (" + string(c.UID) + ")"
}

// Device is one allocation result of the claim that this node's agent serves.
type Device struct {
	// Request is the result's request, with the subrequest after a slash if there is one.
	Request string `json:"request"`
	Pool    string `json:"pool"`
	// Device is the name in the ResourceSlice, GPU the physical GPU behind it.
	Device string `json:"device"`
	GPU    string `json:"gpu"`
	UUID   string `json:"uuid"`
	// AdminAccess results use the device without holding it.
	AdminAccess bool       `json:"adminAccess,omitempty"`
	ShareID     *types.UID `json:"shareID,omitempty"`
	// CDIDeviceIDs are the fully qualified CDI names that the kubelet was or will be told.
	CDIDeviceIDs []string `json:"cdiDeviceIDs"`
}

// StepKind names a kind of side effect.
type StepKind string

// StepCDIFile: a CDI specification file was written; Target is its path.
const StepCDIFile StepKind = "CDIFile"

// Step is one side effect that unprepare, or the roll-back of a failed prepare, takes back.
type Step struct {
	Kind   StepKind `json:"kind"`
	Target string   `json:"target"`
}

// HeldGPUs returns the physical GPUs that the claim holds: those of all results without admin access, each
// once, in the order of the results.
func (e *Entry) HeldGPUs() []string {
	var gpus []string
	seen := map[string]bool{}
	for _, device := range e.Devices {
		if !device.AdminAccess && !seen[device.GPU] {
			seen[device.GPU] = true
			gpus = append(gpus, device.GPU)
		}
	}
	return gpus
}
