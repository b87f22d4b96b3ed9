package hold

import (
	"strings"

	"github.com/google/uuid"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

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

// Claim is allocated the device with that name in ResourceSlices, of that driver and pool, for the pods.
func Claim(driver, pool string, of ledger.PluginDevice, device string, pods []types.UID) *resourceapi.ResourceClaim {
	claim := &resourceapi.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{
			UID:         UID(of),
			Name:        name(of.Resource, device),
			Annotations: map[string]string{annotationResource: of.Resource, annotationID: of.ID},
		},
		Status: resourceapi.ResourceClaimStatus{Allocation: &resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{
			Results: []resourceapi.DeviceRequestAllocationResult{{Request: Request, Driver: driver, Pool: pool, Device: device}},
		}}},
	}
	for _, pod := range pods {
		claim.Status.ReservedFor = append(claim.Status.ReservedFor, resourceapi.ResourceClaimConsumerReference{Resource: "pods", UID: pod})
	}
	return claim
}

// name is a DNS subdomain, as a claim's: nvidia.com.gpu.gpu-0000-1b-00-0.
func name(resource, device string) string {
	return strings.ToLower(strings.ReplaceAll(resource, "/", ".")) + "." + device
}

// Of is the device that the claim stands for, empty for a claim of the API server.
func Of(claim *resourceapi.ResourceClaim) ledger.PluginDevice {
	if claim.Namespace != "" {
		return ledger.PluginDevice{}
	}
	return ledger.PluginDevice{Resource: claim.Annotations[annotationResource], ID: claim.Annotations[annotationID]}
}
