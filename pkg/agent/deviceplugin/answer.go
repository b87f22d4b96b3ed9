// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"fmt"
	"slices"
	"strings"

	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	cdilib "tags.cncf.io/container-device-interface/pkg/cdi"
)

// Strategy is a way to tell the container runtime which devices a container gets. The words are those of NVIDIA's device plugin
// (--device-list-strategy).
type Strategy string

// The strategies.
const (
	// CDIByCRI names CDI devices in the field that the CRI has for them.
	CDIByCRI Strategy = "cdi-cri"
	// CDIByAnnotation names them in an annotation, for a container runtime that does not know the field.
	CDIByAnnotation Strategy = "cdi-annotations"
	// ByEnvironment sets NVIDIA_VISIBLE_DEVICES, for NVIDIA's container runtime without CDI.
	ByEnvironment Strategy = "envvar"
)

// ParseStrategies reads a list with commas between. The error names what is wrong.
func ParseStrategies(list string) ([]Strategy, error) {
	all := []Strategy{CDIByCRI, CDIByAnnotation, ByEnvironment}
	var strategies []Strategy
	for word := range strings.SplitSeq(list, ",") {
		s := Strategy(word)
		switch {
		case !slices.Contains(all, s):
			return nil, fmt.Errorf("%q: want %s, %s, %s, or several with commas between", word, CDIByCRI, CDIByAnnotation, ByEnvironment)
		case slices.Contains(strategies, s):
			return nil, fmt.Errorf("%q is there twice", word)
		}
		strategies = append(strategies, s)
	}
	return strategies, nil
}

// answer is what the kubelet tells the container runtime, and keeps. It says nothing that may be otherwise the next time.
func answer(strategies []Strategy, resource string, devices []Device) (*pluginapi.ContainerAllocateResponse, error) {
	response := &pluginapi.ContainerAllocateResponse{}
	var names, uuids []string
	for _, device := range devices {
		if !slices.Contains(names, device.CDIName) {
			names = append(names, device.CDIName)
		}
		if !slices.Contains(uuids, device.UUID) {
			uuids = append(uuids, device.UUID)
		}
	}
	for _, strategy := range strategies {
		switch strategy {
		case CDIByCRI:
			for _, name := range names {
				response.CdiDevices = append(response.CdiDevices, &pluginapi.CDIDevice{Name: name})
			}
		case CDIByAnnotation:
			// A container may have devices of several resources, each with a key of its own.
			var err error
			if response.Annotations, err = cdilib.UpdateAnnotations(response.Annotations, "stowage",
				strings.ReplaceAll(resource, "/", "-"), names); err != nil {
				return nil, fmt.Errorf("annotation for %s: %w", resource, err)
			}
		case ByEnvironment:
			response.Envs = map[string]string{"NVIDIA_VISIBLE_DEVICES": strings.Join(uuids, ",")}
		}
	}
	return response, nil
}
