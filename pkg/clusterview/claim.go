// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package clusterview

import (
	"fmt"
	"strings"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"stowage.dev/stowage/pkg/snapshot"
)

// Claim is a ResourceClaim with its devices and pods.
type Claim struct {
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
	// State is "pending", "allocated" (no pod uses it), "reserved" (pods do), or "deleting".
	State    string   `json:"state"`
	Requests []string `json:"requests"`
	Node     string   `json:"node,omitempty"`
	Devices  []string `json:"devices,omitempty"`
	// Pods are those that it is reserved for, and Owner the pod or group that it was made for, of its namespace.
	Pods  []string `json:"pods,omitempty"`
	Owner string   `json:"owner,omitempty"`
	// Ready is how many of its devices drivers report as ready: "1/2", empty if they report nothing.
	Ready   string      `json:"ready,omitempty"`
	Created metav1.Time `json:"created"`
}

// Claims returns all claims, by namespace and name.
func Claims(s *snapshot.Snapshot) []*Claim {
	claims := make([]*Claim, 0, len(s.ResourceClaims))
	for _, object := range s.ResourceClaims {
		c := &Claim{
			Namespace: object.Namespace, Name: object.Name, State: "pending", Node: nodeOf(object),
			Pods: PodsOf(object), Created: object.CreationTimestamp,
		}
		if owner := metav1.GetControllerOf(object); owner != nil {
			c.Owner = strings.ToLower(owner.Kind) + "/" + owner.Name
		}
		for i := range object.Spec.Devices.Requests {
			c.Requests = append(c.Requests, describeRequest(&object.Spec.Devices.Requests[i])...)
		}
		if a := object.Status.Allocation; a != nil {
			c.State = "allocated"
			for _, r := range a.Devices.Results {
				c.Devices = append(c.Devices, ID{r.Driver, r.Pool, r.Device}.String())
			}
		}
		switch {
		case object.DeletionTimestamp != nil:
			c.State = "deleting"
		case len(object.Status.ReservedFor) > 0:
			c.State = "reserved"
		}
		c.Ready = readiness(object)
		claims = append(claims, c)
	}
	return claims
}

// Age is how old the claim was when the snapshot was taken.
func (c *Claim) Age(s *snapshot.Snapshot) time.Duration { return s.Taken.Sub(c.Created.Time) }

// describeRequest is "2×gpu.nvidia.com", one for each alternative.
func describeRequest(r *resourceapi.DeviceRequest) (texts []string) {
	one := func(class string, mode resourceapi.DeviceAllocationMode, count int64) string {
		if mode == resourceapi.DeviceAllocationModeAll {
			return "all " + class
		}
		return fmt.Sprintf("%d×%s", max(count, 1), class)
	}
	if r.Exactly != nil {
		return []string{one(r.Exactly.DeviceClassName, r.Exactly.AllocationMode, r.Exactly.Count)}
	}
	for _, sub := range r.FirstAvailable {
		texts = append(texts, one(sub.DeviceClassName, sub.AllocationMode, sub.Count))
	}
	return []string{strings.Join(texts, " or ")}
}

// readiness counts the devices that their drivers report as ready, of all that are allocated.
func readiness(claim *resourceapi.ResourceClaim) string {
	ready, told, all := 0, 0, 0
	if a := claim.Status.Allocation; a != nil {
		all = len(a.Devices.Results)
	}
	for _, d := range claim.Status.Devices {
		for _, c := range d.Conditions {
			if c.Type == "Ready" {
				told++
				if c.Status == metav1.ConditionTrue {
					ready++
				}
			}
		}
	}
	if told == 0 {
		return ""
	}
	return fmt.Sprintf("%d/%d", ready, max(all, told))
}
