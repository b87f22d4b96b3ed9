// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package config

import (
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
)

// Defaults of [DeviceClaimsArgs]. The first two are those of kube-scheduler's DynamicResourcesArgs.
const (
	DefaultFilterTimeout  = 10 * time.Second
	DefaultBindingTimeout = 10 * time.Minute
	DefaultFenceTimeout   = 30 * time.Second
	DefaultFenceJitter    = time.Second
)

// DefaultAuditPeriod is the default of AuditPeriod in [DeviceClaimsArgs].
const DefaultAuditPeriod = 10 * time.Minute

// DeviceClaimsArgs are the arguments of the plugin DeviceClaims.
//
// One Go type serves as the versioned and as the internal type, because there is one version. A second
// version needs a type of its own and a conversion.
type DeviceClaimsArgs struct {
	metav1.TypeMeta `json:",inline"`

	// FilterTimeout bounds the search for devices on one node. A node that takes longer is skipped for this attempt, and so
	// are nodes like it. When twice that time has passed for one pod, each further node has 20 ms. 0 means no bound.
	// Default: 10s.
	// +optional
	FilterTimeout *metav1.Duration `json:"filterTimeout,omitempty"`

	// BindingTimeout bounds how long a pod waits in PreBind until the binding conditions of its devices are true, counted
	// from the allocation. At least 1s. Default: 10m.
	// +optional
	BindingTimeout *metav1.Duration `json:"bindingTimeout,omitempty"`

	// AuditPeriod is how often the scheduler compares its account of claims with a list of all claims from the API. 0 means
	// never, otherwise at least 1s. Devices held by several claims are looked for in any case, whenever claims change. If
	// profiles differ, the first profile's value counts. Default: 10m.
	// +optional
	AuditPeriod *metav1.Duration `json:"auditPeriod,omitempty"`

	// Fence keeps schedulers in several processes that share devices from binding pods to the same ones.
	// +optional
	Fence *FenceArgs `json:"fence,omitempty"`

	// ScoringStrategy says which nodes, and which devices of a node, are preferred among those that a pod can have.
	// +optional
	ScoringStrategy *ScoringStrategy `json:"scoringStrategy,omitempty"`

	// Ownership keeps schedulers that do not know Stowage off devices.
	// +optional
	Ownership *OwnershipArgs `json:"ownership,omitempty"`

	// ClaimsOfOtherNamespaces says how the events and conditions of a pod or claim tell of claims of other namespaces: Count gives their
	// number, so that tenants do not learn each other's names; Name names them. The log names them in any case. In what the audit tells
	// that of the first profile counts. Default: Count.
	// +optional
	ClaimsOfOtherNamespaces ClaimDisclosure `json:"claimsOfOtherNamespaces,omitempty"`
}

// ClaimDisclosure is how much a tenant is told about claims of other namespaces.
type ClaimDisclosure string

// The ways to tell of claims of other namespaces.
const (
	CountClaims ClaimDisclosure = "Count"
	NameClaims  ClaimDisclosure = "Name"
)

// FenceArgs are about the fence between schedulers that share devices.
type FenceArgs struct {
	// Enabled: before a pod is bound, its claims must have passed the fence. Without it, devices may be handed out
	// twice as soon as another scheduler, or another replica of this one, hands out the same ones. Default: true.
	// +optional
	Enabled *bool `json:"enabled,omitempty"`

	// Timeout bounds how long a pod waits until the watch has brought its own claims. Then its allocations are
	// taken back, and it is tried again. At least 1s. Default: 30s.
	// +optional
	Timeout *metav1.Duration `json:"timeout,omitempty"`

	// Jitter is the longest pause, of a random length, that a pod which came second makes in addition to the
	// scheduling queue's backoff before it is tried again. It keeps two schedulers from meeting time and again.
	// 0 means no pause. Default: 1s.
	// +optional
	Jitter *metav1.Duration `json:"jitter,omitempty"`
}

// DefaultOwnedDriver is the driver of Stowage's own node agent.
const DefaultOwnedDriver = "gpu.nvidia.com"

// OwnershipArgs are about the DeviceTaintRule that keeps schedulers which do not know Stowage off devices. A device
// is owned if it meets all that is set. Stowage itself ignores the taint, in all profiles.
type OwnershipArgs struct {
	// Enabled: the scheduler makes the DeviceTaintRule of this profile, and makes it again when somebody deletes or changes
	// it. If false, it removes the rule that it has made before. Default: false.
	// +optional
	Enabled *bool `json:"enabled,omitempty"`

	// Driver is the DRA driver of the owned devices. Default: gpu.nvidia.com.
	// +optional
	Driver string `json:"driver,omitempty"`

	// Pool is the pool of the owned devices; the pool of a node's own devices is usually named after the node. Empty: all.
	// +optional
	Pool string `json:"pool,omitempty"`

	// Device is the name of the owned devices. Empty: all.
	// +optional
	Device string `json:"device,omitempty"`
}

// DeepCopyObject implements [runtime.Object].
func (a *DeviceClaimsArgs) DeepCopyObject() runtime.Object {
	if a == nil {
		return nil
	}
	out := *a
	out.FilterTimeout = copied(a.FilterTimeout)
	out.BindingTimeout = copied(a.BindingTimeout)
	out.AuditPeriod = copied(a.AuditPeriod)
	out.ScoringStrategy = copied(a.ScoringStrategy)
	if out.Fence = copied(a.Fence); out.Fence != nil {
		out.Fence.Enabled = copied(a.Fence.Enabled)
		out.Fence.Timeout = copied(a.Fence.Timeout)
		out.Fence.Jitter = copied(a.Fence.Jitter)
	}
	if out.Ownership = copied(a.Ownership); out.Ownership != nil {
		out.Ownership.Enabled = copied(a.Ownership.Enabled)
	}
	return &out
}

// copied returns a copy of what the pointer points to, nil if that is nothing.
func copied[T any](p *T) *T {
	if p == nil {
		return nil
	}
	out := *p
	return &out
}
