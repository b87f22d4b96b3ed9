// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package hold

import (
	"strconv"
	"strings"

	"github.com/google/uuid"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"stowage.dev/stowage/pkg/agent/discovery"
	"stowage.dev/stowage/pkg/agent/ledger"
)

// Request is the name of the only request of such a claim.
const Request = "device"

// The annotations that tell what a claim stands for. Those of claims from the API server, which have a namespace, mean nothing.
const (
	annotationResource = "stowage.dev/device-plugin-resource"
	annotationID       = "stowage.dev/device-plugin-id"
)

// namespace of the UIDs (RFC 9562, version 5). It must stay: the names of CDI devices, which the kubelet keeps, have the UIDs.
var namespace = uuid.MustParse("6b1f3a52-5c0e-5d7a-9f43-2f1f0c6f7a10")

// UID is the same for the same device at any time.
func UID(of ledger.PluginDevice) types.UID {
	return types.UID(uuid.NewSHA1(namespace, []byte(of.Resource+"\n"+of.ID)).String())
}

// ShareID is that of the share of a GPU that a replica of it is.
func ShareID(of ledger.PluginDevice) types.UID { return UID(of) }

// Claim is allocated the device with that name in ResourceSlices, of that driver and pool, for the pods; of a replica that share of it,
// which is nil for all others. How the GPU is set up, the node decides.
func Claim(driver, pool string, of ledger.PluginDevice, device string, share *ledger.Share, pods []types.UID) *resourceapi.ResourceClaim {
	result := resourceapi.DeviceRequestAllocationResult{Request: Request, Driver: driver, Pool: pool, Device: device}
	if share != nil {
		id := ShareID(of)
		result.ShareID = &id
		result.ConsumedCapacity = map[resourceapi.QualifiedName]resource.Quantity{
			discovery.CapacityMemory:  *resource.NewQuantity(share.MemoryBytes, resource.BinarySI),
			discovery.CapacityCompute: *resource.NewQuantity(int64(share.ComputePercent), resource.DecimalSI),
		}
	}
	claim := &resourceapi.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{
			UID:         UID(of),
			Name:        name(of, device),
			Annotations: map[string]string{annotationResource: of.Resource, annotationID: of.ID},
		},
		Status: resourceapi.ResourceClaimStatus{Allocation: &resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{
			Results: []resourceapi.DeviceRequestAllocationResult{result},
		}}},
	}
	for _, pod := range pods {
		claim.Status.ReservedFor = append(claim.Status.ReservedFor, resourceapi.ResourceClaimConsumerReference{Resource: "pods", UID: pod})
	}
	return claim
}

// name is a DNS subdomain, as a claim's: nvidia.com.gpu.gpu-0000-1b-00-0, and nvidia.com.gpu.shared.gpu-0000-1b-00-0.3 of a replica.
func name(of ledger.PluginDevice, device string) string {
	name := strings.ToLower(strings.ReplaceAll(of.Resource, "/", ".")) + "." + device
	if _, replica, ok := strings.Cut(of.ID, replicaMark); ok {
		name += "." + replica
	}
	return name
}

// replicaMark is before the number of a replica, as with NVIDIA's device plugin.
const replicaMark = "::"

// ReplicaID is the ID of the nth replica of the GPU.
func ReplicaID(uuid string, n int) string { return uuid + replicaMark + strconv.Itoa(n) }

// Of is the device that the claim stands for, empty for a claim of the API server.
func Of(claim *resourceapi.ResourceClaim) ledger.PluginDevice {
	if claim.Namespace != "" {
		return ledger.PluginDevice{}
	}
	return ledger.PluginDevice{Resource: claim.Annotations[annotationResource], ID: claim.Annotations[annotationID]}
}
