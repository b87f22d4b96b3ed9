package config

import (
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
)

// Defaults of [DeviceClaimsArgs]. They are those of kube-scheduler's DynamicResourcesArgs.
const (
	DefaultFilterTimeout  = 10 * time.Second
	DefaultBindingTimeout = 10 * time.Minute
)

// DeviceClaimsArgs are the arguments of the plugin DeviceClaims.
//
// One Go type serves as the versioned and as the internal type, because there is one version. A second
// version needs a type of its own and a conversion.
type DeviceClaimsArgs struct {
	metav1.TypeMeta `json:",inline"`

	// FilterTimeout bounds the search for devices on one node. A node that takes longer is skipped for this
	// attempt, other nodes are not affected. 0 means no bound. Default: 10s.
	// +optional
	FilterTimeout *metav1.Duration `json:"filterTimeout,omitempty"`

	// BindingTimeout bounds how long a pod waits in PreBind until the binding conditions of its devices are
	// true, counted from the allocation (KEP-5007). At least 1s. Default: 10m.
	// +optional
	BindingTimeout *metav1.Duration `json:"bindingTimeout,omitempty"`
}

// DeepCopyObject implements [runtime.Object].
func (a *DeviceClaimsArgs) DeepCopyObject() runtime.Object {
	if a == nil {
		return nil
	}
	out := *a
	out.FilterTimeout = copyDuration(a.FilterTimeout)
	out.BindingTimeout = copyDuration(a.BindingTimeout)
	return &out
}

func copyDuration(d *metav1.Duration) *metav1.Duration {
	if d == nil {
		return nil
	}
	out := *d
	return &out
}
