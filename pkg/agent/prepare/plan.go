package prepare

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"

	"stowage.dev/stowage/pkg/agent/ledger"
)

// wanted is one allocation result that this agent has to prepare.
type wanted struct {
	request     string
	pool        string
	device      string
	adminAccess bool
	result      resourceapi.DeviceRequestAllocationResult
}

// plan reads from the claim's allocation what this node has to do for it. It decides by the claim alone; that
// the devices exist and are free is checked under locks.
func (m *Manager) plan(claim *resourceapi.ResourceClaim) ([]wanted, error) {
	if claim.Status.Allocation == nil {
		return nil, fmt.Errorf("claim %s is not allocated", name(claim))
	}
	if err := ledger.ValidateUID(claim.UID); err != nil {
		return nil, err
	}
	allocation := &claim.Status.Allocation.Devices
	for i, config := range allocation.Config {
		if config.Opaque == nil || config.Opaque.Driver != m.opts.Driver {
			continue
		}
		if err := checkConfig(config.Opaque.Parameters.Raw); err != nil {
			return nil, fmt.Errorf("claim %s: status.allocation.devices.config[%d].opaque.parameters (from the %s): %w",
				name(claim), i, strings.TrimPrefix(string(config.Source), "From"), err)
		}
	}
	var results []wanted
	holder := map[string]string{}
	for _, result := range allocation.Results {
		if result.Driver != m.opts.Driver {
			continue
		}
		if result.Pool != m.opts.Pool {
			return nil, fmt.Errorf("claim %s, request %s: device %s is in pool %q, this node serves pool %q",
				name(claim), result.Request, result.Device, result.Pool, m.opts.Pool)
		}
		want := wanted{
			request:     result.Request,
			pool:        result.Pool,
			device:      result.Device,
			adminAccess: result.AdminAccess != nil && *result.AdminAccess,
			result:      result,
		}
		if !want.adminAccess {
			if other, held := holder[want.device]; held {
				return nil, fmt.Errorf("claim %s: device %s is allocated twice, for the requests %s and %s", name(claim), want.device, other, want.request)
			}
			holder[want.device] = want.request
		}
		results = append(results, want)
	}
	return results, nil
}

// checkConfig admits the parameters of a GpuConfig that asks for nothing, which existing manifests carry.
// Everything else would have to be acted on: ignoring it would hand out a GPU in another mode than asked for.
func checkConfig(raw []byte) error {
	var fields map[string]json.RawMessage
	if err := json.Unmarshal(raw, &fields); err != nil {
		return fmt.Errorf("not a JSON object: %w", err)
	}
	var kind struct {
		APIVersion string `json:"apiVersion"`
		Kind       string `json:"kind"`
	}
	if err := json.Unmarshal(raw, &kind); err != nil {
		return fmt.Errorf("no apiVersion and kind: %w", err)
	}
	if kind.APIVersion != configAPIVersion || kind.Kind != "GpuConfig" {
		return fmt.Errorf("kind %q of apiVersion %q is not supported by this agent, only GpuConfig of %s", kind.Kind, kind.APIVersion, configAPIVersion)
	}
	delete(fields, "apiVersion")
	delete(fields, "kind")
	if len(fields) > 0 {
		return fmt.Errorf("GpuConfig: the fields %s are not supported by this agent", strings.Join(slices.Sorted(maps.Keys(fields)), ", "))
	}
	return nil
}

const configAPIVersion = "resource.nvidia.com/v1beta1"

// name returns namespace/name (UID) for messages.
func name(claim *resourceapi.ResourceClaim) string { return claimRef(claim).String() }

func claimRef(claim *resourceapi.ResourceClaim) ledger.Claim {
	return ledger.Claim{UID: claim.UID, Namespace: claim.Namespace, Name: claim.Name}
}
