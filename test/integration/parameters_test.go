// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package integration

import (
	"context"
	"fmt"
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"stowage.dev/stowage/pkg/agent/config"
	"stowage.dev/stowage/pkg/agent/config/configtest"
)

// parametersOf is a configuration for a driver.
func parametersOf(driver, raw string) resourceapi.DeviceConfiguration {
	return resourceapi.DeviceConfiguration{Opaque: &resourceapi.OpaqueDeviceConfiguration{
		Driver: driver, Parameters: runtime.RawExtension{Raw: []byte(raw)},
	}}
}

// parameterWriters are the ways by which parameters get into the API, without effect, and where each has them.
func (w *world) parameterWriters() map[string]func(context.Context, ...resourceapi.DeviceConfiguration) error {
	options := metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}}
	inSpec := func(configs []resourceapi.DeviceConfiguration) resourceapi.ResourceClaimSpec {
		s := spec(w.exactly("gpu", 1))
		for _, c := range configs {
			s.Devices.Config = append(s.Devices.Config, resourceapi.DeviceClaimConfiguration{DeviceConfiguration: c})
		}
		return s
	}
	return map[string]func(context.Context, ...resourceapi.DeviceConfiguration) error{
		"spec.devices.config": func(ctx context.Context, configs ...resourceapi.DeviceConfiguration) error {
			_, err := w.client.ResourceV1().ResourceClaims(w.name).Create(ctx,
				&resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Name: "parameters"}, Spec: inSpec(configs)}, options)
			return err
		},
		"spec.spec.devices.config": func(ctx context.Context, configs ...resourceapi.DeviceConfiguration) error {
			_, err := w.client.ResourceV1().ResourceClaimTemplates(w.name).Create(ctx, &resourceapi.ResourceClaimTemplate{
				ObjectMeta: metav1.ObjectMeta{Name: "parameters"}, Spec: resourceapi.ResourceClaimTemplateSpec{Spec: inSpec(configs)},
			}, options)
			return err
		},
		"spec.config": func(ctx context.Context, configs ...resourceapi.DeviceConfiguration) error {
			class := &resourceapi.DeviceClass{ObjectMeta: metav1.ObjectMeta{Name: w.name + "-parameters"}}
			for _, c := range configs {
				class.Spec.Config = append(class.Spec.Config, resourceapi.DeviceClassConfiguration{DeviceConfiguration: c})
			}
			_, err := w.client.ResourceV1().DeviceClasses().Create(ctx, class, options)
			return err
		},
	}
}

func (w *world) awaitParametersPolicy() {
	w.t.Helper()
	write := w.parameterWriters()["spec.config"]
	w.awaitPolicy(func(ctx context.Context) error { return write(ctx, parametersOf(gpuDriver, `{}`)) })
}

// The admission policy refuses what the agent's decoder would, and nothing else, by the same table.
func TestParametersAreCheckedWhenTheyAreWritten(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.awaitParametersPolicy()
	for path, write := range w.parameterWriters() {
		// What there is none of is null.
		if err := write(w.ctx); err != nil {
			t.Errorf("%s: no parameters: %v", path, err)
		}
		for name, tc := range configtest.Cases {
			t.Run(path+"/"+name, func(t *testing.T) {
				foreign := parametersOf("nic.example.com", `{"kind":7}`)
				err := write(w.ctx, foreign, parametersOf(gpuDriver, tc.Raw))
				switch {
				case tc.Refused == nil || tc.Unseen != "":
					if err != nil {
						t.Errorf("refused: %v", err)
					}
				case tc.NoPolicy:
					if err == nil {
						t.Error("accepted")
					}
				case !apierrors.IsInvalid(err):
					t.Errorf("got %v, want it invalid", err)
				default:
					for _, want := range append(tc.Refused, path+"[1].opaque.parameters: ") {
						if !strings.Contains(err.Error(), want) {
							t.Errorf("error %q does not say %q", err, want)
						}
					}
					if err := write(w.ctx, parametersOf("nic.example.com", tc.Raw)); err != nil {
						t.Errorf("for another driver: %v", err)
					}
				}
			})
		}
	}
}

// Each field with each of many values: the policy and the decoder agree.
func TestThePolicyAndTheAgentReadParametersAlike(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.awaitParametersPolicy()
	write := w.parameterWriters()["spec.devices.config"]
	of := configtest.Object
	for _, form := range []string{
		`{"apiVersion":%s,"kind":"GpuConfig"}`,
		`{"apiVersion":"` + config.APIVersion + `","kind":%s}`,
		of(config.KindGPU, `"sharing":%s`),
		of(config.KindGPU, `"sharing":{"strategy":%s}`),
		of(config.KindGPU, `"sharing":{"strategy":"TimeSlicing","timeSlicingConfig":%s}`),
		of(config.KindGPU, `"sharing":{"strategy":"TimeSlicing","timeSlicingConfig":{"interval":%s}}`),
		of(config.KindGPU, `"sharing":{"strategy":"TimeSlicing","mpsConfig":%s}`),
		of(config.KindGPU, `"sharing":{"strategy":"Exclusive","timeSlicingConfig":%s}`),
		of(config.KindGPU, `"sharing":{"strategy":"MPS","mpsConfig":%s}`),
		of(config.KindGPU, `"sharing":{"strategy":"MPS","mpsConfig":{"defaultActiveThreadPercentage":%s}}`),
		of(config.KindGPU, `"sharing":{"strategy":"MPS","mpsConfig":{"defaultPinnedDeviceMemoryLimit":%s}}`),
		of(config.KindGPU, `"sharing":{"strategy":"MPS","mpsConfig":{"defaultPerDevicePinnedMemoryLimit":%s}}`),
		of(config.KindGPU, `"sharing":{"strategy":"MPS","mpsConfig":{"defaultPerDevicePinnedMemoryLimit":{"GPU-1":%s}}}`),
		of(config.KindGPU, `"sharing":{"strategy":"MPS","mpsConfig":{"multiUser":%s}}`),
		of(config.KindMIG, `"sharing":%s`),
		of(config.KindMIG, `"sharing":{"strategy":%s}`),
		of(config.KindMIG, `"sharing":{"strategy":"MPS","mpsConfig":%s}`),
		of(config.KindVFIO, `"iommu":%s`),
		of(config.KindVFIO, `"iommu":{"backendPolicy":%s}`),
		of(config.KindVFIO, `"iommu":{"enableAPIDevice":%s}`),
	} {
		for _, value := range []string{
			`null`, `true`, `false`, `-1`, `-0`, `0`, `1`, `1.0`, `1.5`, `1e1`, `100`, `101`, `1048575`, `1048576`, `1073741824.0`, `999999999999999`, `1e15`,
			`1125899906842624`, `9223372036854775808`, `""`, `"MPS"`, `"TimeSlicing"`, `"Exclusive"`, `"Default"`, `"LegacyOnly"`, `"GpuConfig"`,
			`"MigDeviceConfig"`, `"` + config.APIVersion + `"`, `"1Gi"`, `"1Gi "`, `"01Gi"`, `"+1Gi"`, `"1.5G"`, `".5Gi"`, `"1gi"`, `"1Pi"`, `"1048576m"`, `"1024Ti"`,
			`"1024.5Ti"`, `"\u0000"`, `"１Gi"`, `[]`, `["MPS"]`, `{}`, `{"":"1Gi"}`, `{"0":"1Gi"}`, `{"1000":"1Gi"}`, `{"00":"1Gi"}`, `{"GPU-ä":"1Gi"}`, `{"MIG-1/2":"1Gi"}`,
			`{"0":"1Gi","x":1}`, `{"strategy":"MPS"}`, `{"interval":"Long"}`, `{"kind":1}`,
		} {
			raw := fmt.Sprintf(form, value)
			_, _, want := config.Decode([]byte(raw))
			got := write(w.ctx, parametersOf(gpuDriver, raw))
			if got != nil && !apierrors.IsInvalid(got) || (got == nil) != (want == nil) {
				t.Errorf("%s: the policy says %v, and the agent %v", raw, got, want)
			}
			if got != nil && strings.Contains(got.Error(), "expression") {
				t.Errorf("%s: the policy could not decide: %v", raw, got)
			}
		}
	}
}

// A class from before the policy can be labelled, and mended; what is written into it is checked.
func TestParametersOfAClassAreCheckedWhenTheyChange(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	class := w.addClass(w.name + "-class")
	w.awaitParametersPolicy()
	set := func(raw string) error {
		class.Spec.Config = []resourceapi.DeviceClassConfiguration{{DeviceConfiguration: parametersOf(gpuDriver, raw)}}
		_, err := w.client.ResourceV1().DeviceClasses().Update(w.ctx, class, metav1.UpdateOptions{DryRun: []string{metav1.DryRunAll}})
		return err
	}
	if err := set(configtest.Object(config.KindGPU, `"sharing":{"strategy":"None"}`)); !apierrors.IsInvalid(err) || !strings.Contains(err.Error(), `sharing.strategy: "None"`) {
		t.Errorf("got %v, want it invalid", err)
	}
	if err := set(configtest.Object(config.KindGPU, "")); err != nil {
		t.Error(err)
	}
}
