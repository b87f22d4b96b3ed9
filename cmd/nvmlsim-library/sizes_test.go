// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"unsafe"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// sizes of the structures that go between C and Go. Those with handles have them as pointers.
var sizes = map[string]uintptr{
	"nvmlBAR1Memory_t":                    unsafe.Sizeof(nvml.BAR1Memory{}),
	"nvmlComputeInstanceInfo_t":           2*unsafe.Sizeof(uintptr(0)) + 4*unsafe.Sizeof(uint32(0)),
	"nvmlComputeInstancePlacement_t":      unsafe.Sizeof(nvml.ComputeInstancePlacement{}),
	"nvmlComputeInstanceProfileInfo_t":    unsafe.Sizeof(nvml.ComputeInstanceProfileInfo{}),
	"nvmlComputeInstanceProfileInfo_v2_t": unsafe.Sizeof(nvml.ComputeInstanceProfileInfo_v2{}),
	"nvmlComputeInstanceProfileInfo_v3_t": unsafe.Sizeof(nvml.ComputeInstanceProfileInfo_v3{}),
	"nvmlDeviceAddressingMode_t":          unsafe.Sizeof(nvml.DeviceAddressingMode{}),
	"nvmlDeviceAttributes_t":              unsafe.Sizeof(nvml.DeviceAttributes{}),
	"nvmlEventData_t":                     unsafe.Sizeof(uintptr(0)) + 2*unsafe.Sizeof(uint64(0)) + 2*unsafe.Sizeof(uint32(0)),
	"nvmlFieldValue_t":                    unsafe.Sizeof(nvml.FieldValue{}),
	"nvmlGpmMetricsGet_t":                 2*unsafe.Sizeof(uint32(0)) + 2*unsafe.Sizeof(uintptr(0)) + uintptr(nvml.GPM_METRIC_MAX)*unsafe.Sizeof(nvml.GpmMetric{}),
	"nvmlGpmSample_t":                     unsafe.Sizeof(uintptr(0)),
	"nvmlGpmSupport_t":                    unsafe.Sizeof(nvml.GpmSupport{}),
	"nvmlGpuFabricInfo_t":                 unsafe.Sizeof(nvml.GpuFabricInfo{}),
	"nvmlGpuFabricInfo_v2_t":              unsafe.Sizeof(nvml.GpuFabricInfo_v2{}),
	"nvmlGpuFabricInfo_v3_t":              unsafe.Sizeof(nvml.GpuFabricInfo_v3{}),
	"nvmlGpuInstanceInfo_t":               unsafe.Sizeof(uintptr(0)) + 4*unsafe.Sizeof(uint32(0)),
	"nvmlGpuInstancePlacement_t":          unsafe.Sizeof(nvml.GpuInstancePlacement{}),
	"nvmlGpuInstanceProfileInfo_t":        unsafe.Sizeof(nvml.GpuInstanceProfileInfo{}),
	"nvmlGpuInstanceProfileInfo_v2_t":     unsafe.Sizeof(nvml.GpuInstanceProfileInfo_v2{}),
	"nvmlGpuInstanceProfileInfo_v3_t":     unsafe.Sizeof(nvml.GpuInstanceProfileInfo_v3{}),
	"nvmlMarginTemperature_t":             unsafe.Sizeof(nvml.MarginTemperature{}),
	"nvmlMemory_t":                        unsafe.Sizeof(nvml.Memory{}),
	"nvmlMemory_v2_t":                     unsafe.Sizeof(nvml.Memory_v2{}),
	"nvmlPciInfoExt_t":                    unsafe.Sizeof(nvml.PciInfoExt_v1{}),
	"nvmlPciInfo_t":                       unsafe.Sizeof(nvml.PciInfo{}),
	"nvmlProcessInfo_t":                   unsafe.Sizeof(nvml.ProcessInfo{}),
	"nvmlProcessInfo_v1_t":                unsafe.Sizeof(nvml.ProcessInfo_v1{}),
	"nvmlProcessInfo_v2_t":                unsafe.Sizeof(nvml.ProcessInfo_v2{}),
	"nvmlTemperature_t":                   unsafe.Sizeof(nvml.Temperature_v1{}),
	"nvmlUtilization_t":                   unsafe.Sizeof(nvml.Utilization{}),
}
