// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package prepare

import (
	"errors"
	"fmt"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/util/validation"

	"stowage.dev/stowage/pkg/agent/config"
	"stowage.dev/stowage/pkg/agent/hold"
	"stowage.dev/stowage/pkg/agent/ledger"
)

// plan reads from the claim's allocation what this node has to do for it. It decides by the claim alone; that
// the devices exist and are free is checked under locks.
func plan(claim *resourceapi.ResourceClaim, driver, pool string) ([]resourceapi.DeviceRequestAllocationResult, *config.Set, error) {
	if claim.Status.Allocation == nil {
		return nil, nil, fmt.Errorf("claim %s is not allocated", name(claim))
	}
	if err := checkNames(claim); err != nil {
		return nil, nil, err
	}
	allocation := &claim.Status.Allocation.Devices
	parameters, err := config.Read(driver, config.Allocated(claim))
	if err != nil {
		return nil, nil, fmt.Errorf("claim %s: %w", name(claim), err)
	}
	var results []resourceapi.DeviceRequestAllocationResult
	holder := map[string]string{}
	for _, result := range allocation.Results {
		if result.Driver != driver {
			continue
		}
		if result.Pool != pool {
			return nil, nil, fmt.Errorf("claim %s, request %s: device %s is in pool %q, this node serves pool %q",
				name(claim), result.Request, result.Device, result.Pool, pool)
		}
		if !adminAccess(&result) {
			// Several shares of a device are told apart by their IDs.
			key := result.Device
			if result.ShareID != nil {
				key += "/" + string(*result.ShareID)
			}
			if other, held := holder[key]; held {
				return nil, nil, fmt.Errorf("claim %s: device %s is allocated twice, for the requests %s and %s", name(claim),
					key, other, result.Request)
			}
			holder[key] = result.Request
		}
		results = append(results, result)
	}
	return results, parameters, nil
}

// checkNames refuses text of the claim that could leave the file, folder or CDI name of which it becomes a part: the claim's UID
// and name, its name in pods' specs, and the names of its requests. All but the annotation have been checked by the API server, too.
// Devices are looked up among the node's own, and shares have UIDs (see shareOf).
func checkNames(claim *resourceapi.ResourceClaim) error {
	if err := ledger.ValidateUID(claim.UID); err != nil {
		return err
	}
	check := func(field, value string, of func(string) []string) error {
		if problems := of(value); len(problems) > 0 {
			return fmt.Errorf("claim %s/%s: %s: %q: %s", claim.Namespace, claim.Name, field, value, strings.Join(problems, ", "))
		}
		return nil
	}
	errs := []error{check("metadata.name", claim.Name, validation.IsDNS1123Subdomain)}
	if name, ok := claim.Annotations[resourceapi.PodResourceClaimAnnotation]; ok {
		errs = append(errs, check("metadata.annotations["+resourceapi.PodResourceClaimAnnotation+"]", name, validation.IsDNS1123Label))
	}
	for i, result := range claim.Status.Allocation.Devices.Results {
		for part := range strings.SplitSeq(result.Request, "/") {
			errs = append(errs, check(fmt.Sprintf("status.allocation.devices.results[%d].request", i), part, validation.IsDNS1123Label))
		}
	}
	return errors.Join(errs...)
}

// name returns namespace/name (UID) for messages.
func name(claim *resourceapi.ResourceClaim) string { return claimRef(claim).String() }

func claimRef(claim *resourceapi.ResourceClaim) ledger.Claim {
	return ledger.Claim{UID: claim.UID, Namespace: claim.Namespace, Name: claim.Name, Plugin: hold.Of(claim)}
}

func deviceIDs(entry *ledger.Entry) []string {
	var ids []string
	for _, device := range entry.Devices {
		ids = append(ids, device.CDIDeviceIDs...)
	}
	return ids
}
