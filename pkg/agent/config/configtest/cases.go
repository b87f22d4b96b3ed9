// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

// Package configtest has the parameters that are right and wrong, for the tests of the agent's decoder and of the admission policy
// (manifests/base/access/device-parameters.yaml), which have to agree.
package configtest

import (
	"strings"

	"stowage.dev/stowage/pkg/agent/config"
)

// Case is parameters, as JSON, and what the decoder makes of them.
type Case struct {
	Raw string

	// Kind and Settings of what is right.
	Kind     config.Kind
	Settings config.Settings

	// Refused is what the refusals of the decoder and of the policy have in common; nil for what is right.
	Refused []string
	// Text is all that the decoder says, where that is tested.
	Text string
	// Unseen says why the policy cannot know; the agent alone refuses it then.
	Unseen string
	// NoPolicy: the API server itself refuses it, in its own way.
	NoPolicy bool
}

// Object is parameters of a kind with these fields, as JSON.
func Object(kind config.Kind, fields string) string {
	if fields != "" {
		fields = "," + fields
	}
	return `{"apiVersion":"` + config.APIVersion + `","kind":"` + string(kind) + `"` + fields + `}`
}

func gpu(fields string) string  { return Object(config.KindGPU, fields) }
func mig(fields string) string  { return Object(config.KindMIG, fields) }
func vfio(fields string) string { return Object(config.KindVFIO, fields) }
func mps(fields string) string {
	return gpu(`"sharing":{"strategy":"MPS","mpsConfig":{` + fields + `}}`)
}

func sliced(interval config.Interval) config.Settings {
	return config.Settings{Strategy: config.TimeSlicing, Interval: interval}
}

// Cases are all, by what is in them.
var Cases = map[string]Case{
	"nothing asked for": {Raw: gpu(""), Kind: config.KindGPU},
	"time-slicing as it is": {
		Raw: gpu(`"sharing":{"strategy":"TimeSlicing"}`), Kind: config.KindGPU,
		Settings: sliced(config.IntervalDefault),
	},
	"an empty configuration is the default": {
		Raw: gpu(`"sharing":{"strategy":"TimeSlicing","timeSlicingConfig":{}}`), Kind: config.KindGPU, Settings: sliced(config.IntervalDefault),
	},
	"long time slices": {
		Raw: gpu(`"sharing":{"strategy":"TimeSlicing","timeSlicingConfig":{"interval":"Long"}}`), Kind: config.KindGPU,
		Settings: sliced(config.IntervalLong),
	},
	"exclusive": {
		Raw: gpu(`"sharing":{"strategy":"Exclusive"}`), Kind: config.KindGPU, Settings: config.Settings{Strategy: config.Exclusive},
	},
	"MPS without limits": {
		Raw: gpu(`"sharing":{"strategy":"MPS"}`), Kind: config.KindGPU, Settings: config.Settings{Strategy: config.MPS, MPS: &config.Limits{}},
	},
	"MPS with limits": {
		Raw: mps(`"defaultActiveThreadPercentage":50,"defaultPinnedDeviceMemoryLimit":"10Gi",
				"defaultPerDevicePinnedMemoryLimit":{"0":"1.5Gi","GPU-1":1048576}`),
		Kind: config.KindGPU,
		Settings: config.Settings{Strategy: config.MPS, MPS: &config.Limits{
			ActiveThreadPercentage: 50, MemoryMiB: 10240, PerDevice: map[string]int64{"0": 1536, "GPU-1": 1},
		}},
	},
	"the largest limits": {
		Raw: mps(`"defaultActiveThreadPercentage":100,"defaultPinnedDeviceMemoryLimit":"1024Ti",` +
			`"defaultPerDevicePinnedMemoryLimit":{"999":999999999999999}`),
		Kind: config.KindGPU,
		Settings: config.Settings{Strategy: config.MPS, MPS: &config.Limits{
			ActiveThreadPercentage: 100, MemoryMiB: 1 << 30, PerDevice: map[string]int64{"999": 953674316},
		}},
	},
	"MPS for several users": {
		Raw: mps(`"multiUser":true`), Kind: config.KindGPU,
		Settings: config.Settings{Strategy: config.MPS, MPS: &config.Limits{MultiUser: true}},
	},
	"MPS for one user at a time": {
		Raw: mps(`"multiUser":false`), Kind: config.KindGPU,
		Settings: config.Settings{Strategy: config.MPS, MPS: &config.Limits{}},
	},
	"MPS on a MIG device": {
		Raw: mig(`"sharing":{"strategy":"MPS","mpsConfig":{"defaultActiveThreadPercentage":100}}`), Kind: config.KindMIG,
		Settings: config.Settings{Strategy: config.MPS, MPS: &config.Limits{ActiveThreadPercentage: 100}},
	},
	"time-slicing on a MIG device": {
		Raw: mig(`"sharing":{"strategy":"TimeSlicing"}`), Kind: config.KindMIG, Settings: config.Settings{Strategy: config.TimeSlicing},
	},
	"null for what is left out": {
		Raw:  mps(`"defaultActiveThreadPercentage":null,"defaultPinnedDeviceMemoryLimit":null,"defaultPerDevicePinnedMemoryLimit":null`),
		Kind: config.KindGPU, Settings: config.Settings{Strategy: config.MPS, MPS: &config.Limits{}},
	},
	"a virtual machine's GPU":          {Raw: vfio(""), Kind: config.KindVFIO},
	"a virtual machine without wishes": {Raw: vfio(`"iommu":{}`), Kind: config.KindVFIO},
	"NVIDIA's for libvirt":             {Raw: vfio(`"iommu":{"backendPolicy":"LegacyOnly","enableAPIDevice":true}`), Kind: config.KindVFIO},
	"a virtual machine with iommufd": {
		Raw: vfio(`"iommu":{"backendPolicy":"PreferIommuFD"}`), Kind: config.KindVFIO,
		Settings: config.Settings{VFIO: config.VFIO{PreferIOMMUFD: true}},
	},
	"a virtual machine's without a node": {
		Raw: vfio(`"iommu":{"enableAPIDevice":false}`), Kind: config.KindVFIO,
		Settings: config.Settings{VFIO: config.VFIO{NoAPIDevice: true}},
	},

	"empty":          {Raw: "", Refused: []string{"not a JSON object"}, NoPolicy: true},
	"no object":      {Raw: "[]", Refused: []string{"not a JSON object"}, NoPolicy: true},
	"a list for all": {Raw: "[1]", Text: "not a JSON object: [1]", Refused: []string{}, NoPolicy: true},
	"no kind": {
		Raw:     `{"apiVersion":"` + config.APIVersion + `"}`,
		Refused: []string{`kind: ""`, "want one of GpuConfig, MigDeviceConfig, VfioDeviceConfig"},
	},
	"nothing at all": {Raw: `{}`, Refused: []string{`apiVersion: ""`, config.APIVersion}},
	"null for all":   {Raw: `{"apiVersion":null,"kind":null}`, Refused: []string{`apiVersion: `, config.APIVersion}},
	"another version": {
		Raw:     `{"apiVersion":"resource.nvidia.com/v1","kind":"GpuConfig"}`,
		Refused: []string{`apiVersion: "resource.nvidia.com/v1"`, config.APIVersion},
	},
	"another group":          {Raw: `{"apiVersion":"v1","kind":"ConfigMap"}`, Refused: []string{`apiVersion: "v1"`, config.APIVersion}},
	"a number for a version": {Raw: `{"apiVersion":3}`, Text: `apiVersion: 3: want a string`, Refused: []string{"apiVersion: 3: want "}},
	"another kind": {
		Raw:     Object("ComputeDomainChannelConfig", ""),
		Refused: []string{`kind: "ComputeDomainChannelConfig": want one of`},
	},
	"a list for a kind": {
		Raw: `{"apiVersion":"` + config.APIVersion + `","kind":["a"]}`, Text: `kind: ["a"]: want a string`,
		Refused: []string{`kind: [`, "a", "]: want "},
	},
	"unknown field":              {Raw: gpu(`"shared":{}`), Refused: []string{`GpuConfig: unknown field "shared"`}},
	"unknown field further down": {Raw: mps(`"limit":1`), Refused: []string{`GpuConfig: unknown field "sharing.mpsConfig.limit"`}},
	"unknown field of an interval": {
		Raw:     gpu(`"sharing":{"strategy":"TimeSlicing","timeSlicingConfig":{"Interval":"Long"}}`),
		Refused: []string{`GpuConfig: unknown field "sharing.timeSlicingConfig.Interval"`},
	},
	"unknown field that is null":  {Raw: gpu(`"shared":null`), Refused: []string{`GpuConfig: unknown field "shared"`}},
	"another spelling of a field": {Raw: gpu(`"Sharing":{"strategy":"MPS"}`), Refused: []string{`GpuConfig: unknown field "Sharing"`}},
	"another kind's field":        {Raw: vfio(`"sharing":{"strategy":"MPS"}`), Refused: []string{`VfioDeviceConfig: unknown field "sharing"`}},
	"a virtual machine's field":   {Raw: gpu(`"iommu":{}`), Refused: []string{`GpuConfig: unknown field "iommu"`}},
	"a field twice": {
		Raw: gpu(`"sharing":{"strategy":"MPS"},"sharing":{"strategy":"TimeSlicing"}`), Refused: []string{`duplicate field "sharing"`},
		Unseen: "a policy sees an object that has been read, with the last value of each field",
	},
	"a word for an object": {
		Raw: gpu(`"sharing":"MPS"`), Text: `GpuConfig: sharing: "MPS": want an object`,
		Refused: []string{`GpuConfig: sharing: "MPS": want an object`},
	},
	"a long value is cut": {
		Raw:     gpu(`"sharing":"` + strings.Repeat("x", 300) + `"`),
		Text:    `GpuConfig: sharing: "` + strings.Repeat("x", 63) + `…: want an object`,
		Refused: []string{`GpuConfig: sharing: "xxx`, `xxx…: want an object`},
	},
	"a line break in a value": {
		Raw: gpu(`"sharing":"a\nb"`), Text: `GpuConfig: sharing: "a\nb": want an object`,
		Refused: []string{`GpuConfig: sharing: "a\nb": want an object`},
	},
	"a list for an object": {Raw: gpu(`"sharing":[]`), Refused: []string{`GpuConfig: sharing: []: want an object`}},
	"a truth for parameters": {
		Raw:     gpu(`"sharing":{"strategy":"MPS","mpsConfig":true}`),
		Refused: []string{`GpuConfig: sharing.mpsConfig: true: want an object`},
	},
	"no strategy": {
		Raw:     gpu(`"sharing":{}`),
		Refused: []string{`GpuConfig: sharing.strategy: "": want one of TimeSlicing, MPS, Exclusive`},
	},
	"null for a strategy": {
		Raw:     gpu(`"sharing":{"strategy":null}`),
		Refused: []string{`GpuConfig: sharing.strategy: `, `: want one of TimeSlicing, MPS, Exclusive`},
	},
	"unknown strategy": {
		Raw:     gpu(`"sharing":{"strategy":"Mps"}`),
		Refused: []string{`GpuConfig: sharing.strategy: "Mps": want one of TimeSlicing, MPS, Exclusive`},
	},
	"a number for a word": {
		Raw: gpu(`"sharing":{"strategy":5}`), Text: `GpuConfig: sharing.strategy: 5: want a string`,
		Refused: []string{`GpuConfig: sharing.strategy: 5: want `},
	},
	"exclusive MIG device": {
		Raw:     mig(`"sharing":{"strategy":"Exclusive"}`),
		Refused: []string{`MigDeviceConfig: sharing.strategy: "Exclusive": want one of TimeSlicing, MPS`},
	},
	"interval of a MIG device": {
		Raw:     mig(`"sharing":{"strategy":"TimeSlicing","timeSlicingConfig":{}}`),
		Refused: []string{`MigDeviceConfig: unknown field "sharing.timeSlicingConfig"`},
	},
	"unknown interval": {
		Raw:     gpu(`"sharing":{"strategy":"TimeSlicing","timeSlicingConfig":{"interval":"Forever"}}`),
		Refused: []string{`GpuConfig: sharing.timeSlicingConfig.interval: "Forever": want one of Default, Short, Medium, Long`},
	},
	"an object for a word": {
		Raw:     gpu(`"sharing":{"strategy":"TimeSlicing","timeSlicingConfig":{"interval":{"is":"Long"}}}`),
		Text:    `GpuConfig: sharing.timeSlicingConfig.interval: {"is":"Long"}: want a string`,
		Refused: []string{`GpuConfig: sharing.timeSlicingConfig.interval: {`, `Long`, `}: want `},
	},
	"parameters of MPS for slices": {
		Raw:     gpu(`"sharing":{"strategy":"TimeSlicing","mpsConfig":{}}`),
		Refused: []string{`GpuConfig: sharing.mpsConfig: only the strategy MPS has it, and the strategy is`, `"TimeSlicing"`},
	},
	"parameters of slices for MPS": {
		Raw:     gpu(`"sharing":{"strategy":"MPS","timeSlicingConfig":{}}`),
		Refused: []string{`GpuConfig: sharing.timeSlicingConfig: only the strategy TimeSlicing has it, and the strategy is`, `"MPS"`},
	},
	"parameters of MPS for slices of a MIG device": {
		Raw:     mig(`"sharing":{"strategy":"TimeSlicing","mpsConfig":{}}`),
		Refused: []string{`MigDeviceConfig: sharing.mpsConfig: only the strategy MPS has it, and the strategy is`, `"TimeSlicing"`},
	},
	"text for several users": {
		Raw: mps(`"multiUser":"yes"`), Text: `GpuConfig: sharing.mpsConfig.multiUser: "yes": want true or false`,
		Refused: []string{`GpuConfig: sharing.mpsConfig.multiUser: "yes": want true or false`},
	},
	"no threads": {
		Raw:     mps(`"defaultActiveThreadPercentage":0`),
		Refused: []string{"GpuConfig: sharing.mpsConfig.defaultActiveThreadPercentage: 0: want ", "1 to 100"},
	},
	"too many threads": {
		Raw:     mps(`"defaultActiveThreadPercentage":101`),
		Refused: []string{"GpuConfig: sharing.mpsConfig.defaultActiveThreadPercentage: 101: want ", "1 to 100"},
	},
	"text for a number": {
		Raw:     mps(`"defaultActiveThreadPercentage":"half"`),
		Text:    `GpuConfig: sharing.mpsConfig.defaultActiveThreadPercentage: "half": want a whole number`,
		Refused: []string{`GpuConfig: sharing.mpsConfig.defaultActiveThreadPercentage: "half": want a whole number`},
	},
	"a fraction for a number": {
		Raw:     mps(`"defaultActiveThreadPercentage":1.5`),
		Text:    `GpuConfig: sharing.mpsConfig.defaultActiveThreadPercentage: 1.5: want a whole number`,
		Refused: []string{`GpuConfig: sharing.mpsConfig.defaultActiveThreadPercentage: 1.5`, `: want a whole number`},
	},
	"a fraction that is none": {
		Raw:     mps(`"defaultActiveThreadPercentage":50.0`),
		Refused: []string{`GpuConfig: sharing.mpsConfig.defaultActiveThreadPercentage: 50`, `: want a whole number`},
	},
	"limit that is none": {
		Raw:     mps(`"defaultPinnedDeviceMemoryLimit":"much"`),
		Refused: []string{`GpuConfig: sharing.mpsConfig.defaultPinnedDeviceMemoryLimit: "much": want a number of bytes`},
	},
	"limit with an exponent, in text": {
		Raw:     mps(`"defaultPinnedDeviceMemoryLimit":"1e2147483647"`),
		Refused: []string{`sharing.mpsConfig.defaultPinnedDeviceMemoryLimit: "1e2147483647": want a number of bytes`},
	},
	"limit with an exponent": {
		Raw:     mps(`"defaultPinnedDeviceMemoryLimit":1e2147483647`),
		Refused: []string{`sharing.mpsConfig.defaultPinnedDeviceMemoryLimit: 1e2147483647`}, NoPolicy: true,
	},
	"limit with a small exponent": {
		Raw:     mps(`"defaultPinnedDeviceMemoryLimit":1e9`),
		Refused: []string{`GpuConfig: sharing.mpsConfig.defaultPinnedDeviceMemoryLimit: 1`, `: want a number of bytes`},
	},
	"limit with a fraction of a byte": {
		Raw:     mps(`"defaultPinnedDeviceMemoryLimit":2097152.5`),
		Refused: []string{`GpuConfig: sharing.mpsConfig.defaultPinnedDeviceMemoryLimit: 2`, `: want a number of bytes`},
	},
	"limit too small": {
		Raw:     mps(`"defaultPinnedDeviceMemoryLimit":"1023Ki"`),
		Refused: []string{`GpuConfig: sharing.mpsConfig.defaultPinnedDeviceMemoryLimit: "1023Ki": want `, "at least 1Mi"},
	},
	"limit too small by less": {
		Raw:     mps(`"defaultPinnedDeviceMemoryLimit":"1048575.5"`),
		Refused: []string{`GpuConfig: sharing.mpsConfig.defaultPinnedDeviceMemoryLimit: "1048575.5": want `, "at least 1Mi"},
	},
	"limit too small for a number": {
		Raw:     mps(`"defaultPinnedDeviceMemoryLimit":1048575`),
		Refused: []string{`GpuConfig: sharing.mpsConfig.defaultPinnedDeviceMemoryLimit: 1048575: want `, "at least 1Mi"},
	},
	"limit too large": {
		Raw:     mps(`"defaultPinnedDeviceMemoryLimit":"999999999999999Ti"`),
		Refused: []string{`GpuConfig: sharing.mpsConfig.defaultPinnedDeviceMemoryLimit: "999999999999999Ti": want `, "at most 1Pi"},
	},
	"limit too large by a little": {
		Raw:     mps(`"defaultPinnedDeviceMemoryLimit":"1024.000001Ti"`),
		Refused: []string{`GpuConfig: sharing.mpsConfig.defaultPinnedDeviceMemoryLimit: "1024.000001Ti": want `, "at most 1Pi"},
	},
	"limit with too many digits": {
		Raw:     mps(`"defaultPinnedDeviceMemoryLimit":1000000000000000`),
		Refused: []string{`GpuConfig: sharing.mpsConfig.defaultPinnedDeviceMemoryLimit: 1000000000000000: want a number of bytes`},
	},
	"a word for a quantity": {
		Raw:     mps(`"defaultPinnedDeviceMemoryLimit":true`),
		Text:    `GpuConfig: sharing.mpsConfig.defaultPinnedDeviceMemoryLimit: true: want a number of bytes such as 512Mi or 10Gi`,
		Refused: []string{`GpuConfig: sharing.mpsConfig.defaultPinnedDeviceMemoryLimit: true: want a number of bytes such as 512Mi or 10Gi`},
	},
	"limit for a path": {
		Raw:     mps(`"defaultPerDevicePinnedMemoryLimit":{"../x":"1Gi"}`),
		Refused: []string{`GpuConfig: sharing.mpsConfig.defaultPerDevicePinnedMemoryLimit["../x"]: `, "want the UUID of a device, or its index"},
	},
	"limit for a device": {
		Raw:     mps(`"defaultPerDevicePinnedMemoryLimit":{"1":"-1Gi"}`),
		Refused: []string{`GpuConfig: sharing.mpsConfig.defaultPerDevicePinnedMemoryLimit["1"]: "-1Gi": want a number of bytes`},
	},
	"limit that is null": {
		Raw:     mps(`"defaultPerDevicePinnedMemoryLimit":{"1":null}`),
		Refused: []string{`GpuConfig: sharing.mpsConfig.defaultPerDevicePinnedMemoryLimit["1"]: null: want a number of bytes`},
	},
	"a list for the limit": {
		Raw:     mps(`"defaultPerDevicePinnedMemoryLimit":{"0":[1]}`),
		Text:    `GpuConfig: sharing.mpsConfig.defaultPerDevicePinnedMemoryLimit["0"]: [1]: want a number of bytes such as 512Mi or 10Gi`,
		Refused: []string{`GpuConfig: sharing.mpsConfig.defaultPerDevicePinnedMemoryLimit["0"]: [1]: want a number of bytes`},
	},
	"a list for the limits": {
		Raw:     mps(`"defaultPerDevicePinnedMemoryLimit":[]`),
		Text:    `GpuConfig: sharing.mpsConfig.defaultPerDevicePinnedMemoryLimit: []: want an object`,
		Refused: []string{`GpuConfig: sharing.mpsConfig.defaultPerDevicePinnedMemoryLimit: []: want an object`},
	},
	"limit on a MIG device": {
		Raw:     mig(`"sharing":{"strategy":"MPS","mpsConfig":{"defaultActiveThreadPercentage":-1}}`),
		Refused: []string{"MigDeviceConfig: sharing.mpsConfig.defaultActiveThreadPercentage: -1: want "},
	},
	"a wrong backend": {
		Raw:     vfio(`"iommu":{"backendPolicy":"iommufd"}`),
		Refused: []string{`VfioDeviceConfig: iommu.backendPolicy: "iommufd": want one of LegacyOnly, PreferIommuFD`},
	},
	"a wrong case": {
		Raw:     vfio(`"iommu":{"BackendPolicy":"LegacyOnly"}`),
		Refused: []string{`VfioDeviceConfig: unknown field "iommu.BackendPolicy"`},
	},
	"a word for a truth": {
		Raw:     vfio(`"iommu":{"enableAPIDevice":"yes"}`),
		Text:    `VfioDeviceConfig: iommu.enableAPIDevice: "yes": want true or false`,
		Refused: []string{`VfioDeviceConfig: iommu.enableAPIDevice: "yes": want true or false`},
	},
	"a list for a virtual machine": {Raw: vfio(`"iommu":[]`), Refused: []string{`VfioDeviceConfig: iommu: []: want an object`}},
	"too long":                     {Raw: gpu(`"` + strings.Repeat("x", 10*1024) + `":1`), Refused: []string{"bytes"}, NoPolicy: true},
}
