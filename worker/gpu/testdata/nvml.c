// A stand-in for libnvidia-ml.so.1 with two devices, so that calls, argument order
// and structures are tested against C. fake_set changes what it answers.
#include <string.h>
#include <unistd.h>

typedef unsigned int u32;
typedef unsigned long long u64;
typedef struct { int index; } device;
typedef struct { u64 total, free, used; } memory;
typedef struct { u32 gpu, memory; } utilization;
typedef struct { void *device; u64 type, data; u32 gi, ci; } event;

static device devices[2] = {{0}, {1}};
static volatile u64 value[16]; // by the numbers of fake_set, for device 0
static volatile u64 xid;
static int registered[2];

enum { RETURN = 0, REASONS = 1, ECC = 2, FAILED = 3, PENDING = 4 };

void fake_set(u32 what, u64 to) { value[what] = to; }
void fake_xid(u64 n) { xid = n; }

int nvmlInit_v2(void) { return 0; }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int code) { return code == 15 ? "GPU is lost" : "some error"; }
int nvmlDeviceGetCount_v2(u32 *n) { *n = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(u32 i, void **d) { *d = &devices[i]; return 0; }

static int fails(device *d) { return d->index == 0 ? (int)value[RETURN] : 0; }

int nvmlDeviceGetUUID(device *d, char *text, u32 size) {
  if (size != 80) return 7;
  strcpy(text, d->index == 0 ? "GPU-aaaa" : "GPU-bbbb");
  return fails(d);
}
int nvmlDeviceGetName(device *d, char *text, u32 size) {
  strcpy(text, "Fake H200");
  return size == 96 ? 0 : 7;
}
int nvmlDeviceGetMemoryInfo(device *d, memory *m) {
  m->total = 141ull << 30; m->used = (u64)(d->index + 1) << 30; m->free = m->total - m->used;
  return 0;
}
int nvmlDeviceGetUtilizationRates(device *d, utilization *u) { u->gpu = 75; u->memory = 12; return 0; }
int nvmlDeviceGetTemperature(device *d, u32 sensor, u32 *celsius) { *celsius = 61 + sensor; return 0; }
int nvmlDeviceGetPowerUsage(device *d, u32 *milliwatts) { *milliwatts = 345600; return 0; }
int nvmlDeviceGetCurrentClocksThrottleReasons(device *d, u64 *bits) {
  *bits = d->index == 0 ? value[REASONS] : 0;
  return 0;
}
int nvmlDeviceGetTotalEccErrors(device *d, u32 kind, u32 counter, u64 *n) {
  *n = d->index == 0 && kind == 1 && counter == 0 ? value[ECC] : 0;
  return 0;
}
int nvmlDeviceGetRemappedRows(device *d, u32 *corr, u32 *uncorr, u32 *pending, u32 *failed) {
  *corr = 5; *uncorr = 6;
  *pending = d->index == 0 ? value[PENDING] : 0;
  *failed = d->index == 0 ? value[FAILED] : 0;
  return 0;
}
int nvmlEventSetCreate(void **set) { *set = &registered; return 0; }
int nvmlDeviceRegisterEvents(device *d, u64 types, void *set) {
  registered[d->index] = types == 8 && set == &registered;
  return registered[d->index] ? 0 : 2;
}
int nvmlEventSetWait_v2(void *set, event *e, u32 milliseconds) {
  for (u32 waited = 0; set == &registered && registered[1]; waited++) {
    if (xid != 0) {
      e->device = &devices[1]; e->type = 8; e->data = xid; e->gi = e->ci = ~0u;
      xid = 0;
      return 0;
    }
    if (waited >= milliseconds) return 10;
    usleep(1000);
  }
  return 3;
}
int nvmlEventSetFree(void *set) { return set == &registered ? 0 : 2; }
