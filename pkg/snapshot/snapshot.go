// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package snapshot

import (
	"cmp"
	"slices"
	"strings"

	v1 "k8s.io/api/core/v1"
	policyapi "k8s.io/api/policy/v1"
	resourceapi "k8s.io/api/resource/v1"
	schedulingapi "k8s.io/api/scheduling/v1"
	groupapi "k8s.io/api/scheduling/v1beta1"
	storageapi "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

const (
	// APIVersion and Kind are what a file begins with. A file of another version is refused.
	APIVersion = "stowage.dev/v1alpha1"
	Kind       = "ClusterSnapshot"
)

// Snapshot is a cluster at about one moment. Lists are taken one after the other, so that an object may be newer than
// another one by the time that this takes. Read only: commands share it.
type Snapshot struct {
	metav1.TypeMeta `json:",inline"`
	// Taken is when the lists were complete.
	Taken metav1.Time `json:"taken"`
	// ServerVersion is the API server's, "v1.37.1".
	ServerVersion string `json:"serverVersion,omitempty"`
	// HashedNames tells that names of users are replaced.
	HashedNames bool `json:"hashedNames,omitempty"`
	// Missing are the kinds that could not be read, and why.
	Missing []Missing `json:"missing,omitempty"`
	// Installation is for doctor; nil if it was not asked for, is of an older version, or names are hashed.
	Installation *Installation `json:"installation,omitempty"`
	Objects      `json:",inline"`
}

// Missing is a kind that could not be read. What depends on it is answered as if there were no such objects.
type Missing struct {
	Resource string `json:"resource"`
	Reason   string `json:"reason"`
}

// Objects are a cluster's, by kind, each list by namespace and name.
type Objects struct {
	Nodes                  []*v1.Node                           `json:"nodes,omitempty"`
	Pods                   []*v1.Pod                            `json:"pods,omitempty"`
	Namespaces             []*v1.Namespace                      `json:"namespaces,omitempty"`
	PersistentVolumeClaims []*v1.PersistentVolumeClaim          `json:"persistentVolumeClaims,omitempty"`
	PersistentVolumes      []*v1.PersistentVolume               `json:"persistentVolumes,omitempty"`
	StorageClasses         []*storageapi.StorageClass           `json:"storageClasses,omitempty"`
	CSINodes               []*storageapi.CSINode                `json:"csiNodes,omitempty"`
	PodDisruptionBudgets   []*policyapi.PodDisruptionBudget     `json:"podDisruptionBudgets,omitempty"`
	PriorityClasses        []*schedulingapi.PriorityClass       `json:"priorityClasses,omitempty"`
	PodGroups              []*groupapi.PodGroup                 `json:"podGroups,omitempty"`
	ResourceSlices         []*resourceapi.ResourceSlice         `json:"resourceSlices,omitempty"`
	ResourceClaims         []*resourceapi.ResourceClaim         `json:"resourceClaims,omitempty"`
	ResourceClaimTemplates []*resourceapi.ResourceClaimTemplate `json:"resourceClaimTemplates,omitempty"`
	DeviceClasses          []*resourceapi.DeviceClass           `json:"deviceClasses,omitempty"`
	DeviceTaintRules       []*resourceapi.DeviceTaintRule       `json:"deviceTaintRules,omitempty"`
}

// New returns a snapshot of the objects, which it sorts.
func New(objects Objects) *Snapshot {
	s := &Snapshot{TypeMeta: metav1.TypeMeta{APIVersion: APIVersion, Kind: Kind}, Objects: objects}
	for _, k := range kinds {
		k.sort(&s.Objects)
	}
	return s
}

// Clone returns a copy whose lists can be changed, and whose objects are the same.
func (o *Objects) Clone() Objects {
	clone := *o
	for _, k := range kinds {
		k.detach(&clone)
	}
	return clone
}

// Reference names an object as messages do: "namespace/name", or its name.
func Reference(object metav1.Object) string {
	if ns := object.GetNamespace(); ns != "" {
		return ns + "/" + object.GetName()
	}
	return object.GetName()
}

func sortByName[T metav1.Object](list []T) {
	slices.SortStableFunc(list, func(a, b T) int {
		return cmp.Or(strings.Compare(a.GetNamespace(), b.GetNamespace()), strings.Compare(a.GetName(), b.GetName()))
	})
}
